"""A plan: which layers are split, and how; patterns matched against a model's modules."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.layers import is_transposed
from lightning_shard.tensor_parallel.styles import Style, style_of


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer of a plan.

    Attributes:
        name: The module's path in the model.
        module: The layer.
        style: How it is split.
        pattern: The plan's entry that says so.
    """

    name: str
    module: nn.Module
    style: Style
    pattern: str


def match_plan(model: nn.Module, plan: Mapping[str, Any]) -> list[PlannedLayer]:
    """Find the layers that a plan names.

    Args:
        model: Any module.
        plan: Maps patterns to styles. A pattern is a module's path, in which `*` stands for one
            part of it, or for a piece of one: `blocks.*.mlp.up`.

    Returns:
        In the order of the model's modules.

    Raises:
        ConfigError: A pattern that matches nothing, a module that two patterns match, an unknown
            style, or a layer that cannot be split so.
    """
    styles = {pattern: style_of(value, pattern) for pattern, value in plan.items()}
    matchers = {pattern: _matcher(pattern) for pattern in plan}
    found: list[PlannedLayer] = []
    for name, module in model.named_modules():
        patterns = [one for one, matcher in matchers.items() if name and matcher.fullmatch(name)]
        if len(patterns) > 1:
            raise ConfigError(
                f"The module {name!r} is matched by the plan's entries {patterns[0]!r} and "
                f"{patterns[1]!r}, expected one. Make the patterns narrower."
            )
        for pattern in patterns:
            _check_layer(name, module, styles[pattern])
            found.append(
                PlannedLayer(name=name, module=module, style=styles[pattern], pattern=pattern)
            )
    _check_all_matched(model, plan, {layer.pattern for layer in found})
    return found


def describe_plan(layers: list[PlannedLayer]) -> Iterator[str]:
    """Yield a line for each entry of a plan: its pattern, its style, and how many layers it has."""
    by_pattern: dict[str, list[PlannedLayer]] = {}
    for layer in layers:
        by_pattern.setdefault(layer.pattern, []).append(layer)
    width = max(map(len, by_pattern), default=0)
    for pattern, matched in by_pattern.items():
        kinds = ", ".join(sorted({type(layer.module).__name__ for layer in matched}))
        yield f"{pattern:<{width}}  {matched[0].style.form:<8}  {len(matched)} x {kinds}"


def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))


def _check_all_matched(model: nn.Module, plan: Mapping[str, Any], matched: set[str]) -> None:
    for pattern in plan:
        if pattern not in matched:
            names = [name for name, _ in model.named_modules() if name]
            shapes = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
            near = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0.4) or shapes[:8]
            raise ConfigError(
                f"The plan's entry {pattern!r} matches no module of {type(model).__name__}; "
                f"the nearest are {', '.join(near)}."
            )


def _check_layer(name: str, module: nn.Module, style: Style) -> None:
    is_linear = isinstance(module, nn.Linear) or is_transposed(module)
    fits = (
        isinstance(module, nn.Embedding)
        if style.form == "vocab"
        else (is_linear or (style.form == "colwise" and isinstance(module, nn.Embedding)))
    )
    if not fits:
        raise ConfigError(
            f"The plan splits {name!r} {style.form}, but it is a {type(module).__name__}; expected "
            f"{'an Embedding' if style.form == 'vocab' else 'a linear layer'}. Name the layers "
            "inside it."
        )
