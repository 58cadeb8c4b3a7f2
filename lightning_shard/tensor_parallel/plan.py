"""A plan: patterns of the layers to split, with their styles, matched against a model."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_shard.data_parallel.memory.inner_tensors import is_taken_apart
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.layers import has_weight, is_plain_attention, is_plain_linear
from lightning_shard.tensor_parallel.styles import Form, Style, style_of
from lightning_shard.tensor_parallel.wrappers import has_adapter, is_linear, wrapped_embedding


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer of a plan.

    Attributes:
        name: Path of the layer in the model.
        pattern: The plan's entry that matches the layer.
        has_heads: Whether the layer's parent counts heads that are split with it; None to tell by
            the parent's attributes.
    """

    name: str
    module: nn.Module
    style: Style
    pattern: str
    has_heads: bool | None = None

    @property
    def parent(self) -> str:
        """Path of the module that has the layer."""
        return self.name.rpartition(".")[0]


def match_plan(
    model: nn.Module, plan: Mapping[str, Any], *, is_own: bool = False
) -> list[PlannedLayer]:
    """Find the layers that a plan names, in the order of the model's modules.

    Args:
        model: The module whose layers are matched, of any kind.
        plan: Maps patterns to styles. A pattern is a module's path, in which `*` stands for one
            part of it, or for a part of one: `blocks.*.mlp.up`.
        is_own: Whether the model says it itself, which knows nothing of weights that are made of
            several tensors: they are no misfits.

    Raises:
        ConfigError: A pattern matches nothing, two patterns match one module, a style is unknown,
            or a layer cannot be split by its style.
    """
    styles = {pattern: style_of(value, pattern) for pattern, value in plan.items()}
    matchers = {pattern: matcher_of(pattern) for pattern in plan}
    found: list[PlannedLayer] = []
    for name, module in model.named_modules():
        patterns = [one for one, matcher in matchers.items() if name and matcher.fullmatch(name)]
        if len(patterns) > 1:
            raise ConfigError(
                f"The module {name!r} is matched by the plan's entries {patterns[0]!r} and "
                f"{patterns[1]!r}, expected one. Make the patterns narrower."
            )
        for pattern in patterns:
            if not (is_own and is_taken_apart(module)):
                _check_layer(name, module, styles[pattern])
            found.append(
                PlannedLayer(name=name, module=module, style=styles[pattern], pattern=pattern)
            )
    _check_all_matched(model, plan, {layer.pattern for layer in found})
    return found


def pattern_of(name: str) -> str:
    """Return the pattern of a module's path, in which `*` stands for each number."""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)


def matcher_of(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of the module paths that a pattern matches."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))


def _check_all_matched(model: nn.Module, plan: Mapping[str, Any], matched: set[str]) -> None:
    for pattern in plan:
        if pattern not in matched:
            names = [name for name, _ in model.named_modules() if name]
            shapes = list(dict.fromkeys(map(pattern_of, names)))
            near = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0.4) or shapes[:8]
            raise ConfigError(
                f"The plan's entry {pattern!r} matches no module of {type(model).__name__}; "
                f"the nearest are {', '.join(near)}."
            )


def _check_layer(name: str, module: nn.Module, style: Style) -> None:
    expected, fits = _EXPECTED[style.form]
    if not fits(module):
        raise ConfigError(
            f"The plan splits {name!r} {style.form}, but it is a {_kind(module)}; expected "
            f"{expected}. Name the layers inside it."
        )


def _kind(module: nn.Module) -> str:
    """Return a layer's class, with its package where torch has one of the same name."""
    kind = type(module)
    return kind.__name__ if kind.__name__ not in dir(nn) else f"{kind.__module__}.{kind.__name__}"


def gives_features(module: nn.Module) -> bool:
    """Whether a layer is linear, or wrapped around a linear one."""
    return is_linear(module) or has_adapter(module)


def _is_embedding(module: nn.Module) -> bool:
    is_one = has_weight(module) and isinstance(module, nn.Embedding)
    return is_one or wrapped_embedding(module) is not None


_EXPECTED: dict[Form, tuple[str, Callable[[nn.Module], bool]]] = {
    "colwise": (
        "a linear layer whose weight is a parameter",
        lambda one: gives_features(one) or _is_embedding(one),
    ),
    "rowwise": (
        "a linear layer without a forward of its own, whose weight is a parameter",
        lambda one: is_plain_linear(one) or has_adapter(one),
    ),
    "shared": ("a Linear", gives_features),
    "vocab": ("an Embedding whose weight is a parameter", _is_embedding),
    "attention": ("torch's MultiheadAttention with its own forward", is_plain_attention),
    "experts": ("a layer with parameters of its own", lambda one: bool(one._parameters)),
    **dict.fromkeys(
        ("unsplit", "unsplit_shared", "shared_tail"), ("a linear layer", gives_features)
    ),
    "replica": ("a layer with parameters of its own", lambda one: bool(one._parameters)),
}
