"""A trial of whether wrappers of linear layers may be split by their inner layers.

unsplit    x ──> [ wrapper ] ──> y
rank r     x, or its features ──> [ wrapper in parts ] ──> features of y, or a summand of it
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.probe import Alone, bare_copy, is_close, split_alone
from lightning_shard.tensor_parallel.styles import STYLES, Style
from lightning_shard.tensor_parallel.wrappers import (
    bias_of,
    copies_in,
    has_adapter,
    inner_styles,
    linear_sizes,
    unsplit_style,
    wrapped_embedding,
)


def with_tried_wrappers(layers: Iterable[PlannedLayer], num_ranks: int) -> Iterator[PlannedLayer]:
    """Yield a plan's layers; wrappers that compute something else in parts get an unsplit style.

    Args:
        layers: Layers of a plan that a user or a model gives.
        num_ranks: Number of ranks of the tensor-parallel group.
    """
    tried: dict[Any, bool] = {}
    full: dict[str, list[str]] = {}
    for layer in layers:
        inner = inner_styles(layer.module, layer.style)
        module = layer.module
        if not has_adapter(module) or wrapped_embedding(module) or copies_in(module):
            yield layer
            continue
        key = _look(layer)
        if key not in tried:
            tried[key] = len(inner) > 1 and _is_right(layer, num_ranks)
        if tried[key] or num_ranks == 1:
            yield layer
            continue
        full.setdefault(type(layer.module).__name__, []).append(layer.name)
        yield dataclasses.replace(layer, style=unsplit_style(layer.style))
    for kind, names in full.items():
        rank_zero_warn(
            f"{names[0]!r} is a {kind} around a linear layer that computes something else in "
            f"parts; it is computed full on each of the {num_ranks} tensor-parallel ranks, as are "
            f"{len(names) - 1} others. Low-rank adapters of two linear layers are split."
        )


def _look(layer: PlannedLayer) -> Any:
    sizes = [(name, param.shape) for name, param in layer.module.named_parameters()]
    return type(layer.module), layer.style, tuple(sizes)


def _is_right(layer: PlannedLayer, num_ranks: int) -> bool:
    is_rowwise = layer.style.form == "rowwise"
    style = STYLES["rowwise"] if is_rowwise else STYLES["colwise"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            full = nn.ModuleDict({"layer": bare_copy(layer.module)})
            width = linear_sizes(full["layer"])[0]
            values = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(1))
            inputs = values.chunk(num_ranks, -1) if is_rowwise else [values] * num_ranks
            parts = [_part(full, style, Alone(r, num_ranks), inputs[r]) for r in range(num_ranks)]
            expected = full["layer"](values)
            if not is_rowwise:
                return is_close(torch.cat(parts, -1), expected)
            extra = (num_ranks - 1) * bias_of(full["layer"])
            return is_close(torch.stack(parts).sum(0) - extra, expected)
        except Exception:
            return False


def _part(full: nn.ModuleDict, style: Style, group: Alone, values: Tensor) -> Tensor:
    part = copy.deepcopy(full)
    split_alone(part, {"layer": style}, group)
    result: Tensor = part["layer"](values)
    return result
