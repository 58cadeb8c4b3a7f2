"""The styles by which a plan says how a layer is split.

    style                     weight is cut       takes          gives
    colwise                   by outputs          whole          features
    colwise_gather_output     by outputs          whole          whole
    rowwise                   by inputs           features       whole (a sum over ranks)
    rowwise_split_input       by inputs           whole          whole (a sum over ranks)
    embedding_rowwise         by vocabulary       whole ids      whole (a sum over ranks)
    embedding_colwise         by features         whole ids      whole
    packed_colwise(n)         n fused matrices, each by outputs; as colwise

An activation is *whole* when every rank has all of it, and in *features* when each has its part
of the last dimension. The names are those of Hugging Face's `tp_plan`; `colwise_rep`,
`rowwise_rep` and torch's style objects mean the same.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal

from lightning_shard.errors import ConfigError

Form = Literal["colwise", "rowwise", "vocab"]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one layer is split.

    Attributes:
        form: Which of the layer's forms in `layers`.
        num_blocks: Matrices that are fused in the weight, each of which is cut by itself.
        whole_input: The layer is given whole activations, not features.
        whole_output: The layer gives whole activations, not features.
    """

    form: Form
    num_blocks: int = 1
    whole_input: bool = True
    whole_output: bool = True


STYLES: dict[str, Style] = {
    "colwise": Style(form="colwise", whole_output=False),
    "colwise_gather_output": Style(form="colwise"),
    "rowwise": Style(form="rowwise", whole_input=False),
    "rowwise_split_input": Style(form="rowwise"),
    "embedding_rowwise": Style(form="vocab"),
    "embedding_colwise": Style(form="colwise"),
}
_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_PACKED = re.compile(r"packed_colwise\((\d+)\)")


def style_of(value: Any, pattern: str) -> Style:
    """Return the style that a plan's entry means.

    Args:
        value: A name, a `Style`, or an object of `torch.distributed.tensor.parallel`.
        pattern: The entry's pattern, for the error.

    Raises:
        ConfigError: No such style.
    """
    if isinstance(value, Style):
        return value
    if isinstance(value, str):
        return _named(value, pattern)
    return _of_torch(value, pattern)


def _named(name: str, pattern: str) -> Style:
    name = _ALIASES.get(name, name)
    if name in STYLES:
        return STYLES[name]
    if (packed := _PACKED.fullmatch(name)) is not None:
        return Style(form="colwise", num_blocks=int(packed[1]), whole_output=False)
    known = [*STYLES, *_ALIASES, "packed_colwise(3)"]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"The plan's entry {pattern!r} has the unknown style {name!r}; expected one of "
        f"{', '.join(known)}.{hint}"
    )


def _of_torch(value: Any, pattern: str) -> Style:
    """Read torch's style object: its layouts say what goes in and out."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    forms: dict[type, Form] = {ColwiseParallel: "colwise", RowwiseParallel: "rowwise"}
    form = forms.get(type(value))
    if form is not None:
        whole = {Replicate(): True, Shard(-1): False}
        taken, given = whole.get(value.input_layouts[0]), whole.get(value.output_layouts[0])
        if taken is not None and given is not None:
            return Style(form=form, whole_input=taken, whole_output=given)
    raise ConfigError(
        f"The plan's entry {pattern!r} is {value!r}, expected a style's name ({', '.join(STYLES)}) "
        f"or a ColwiseParallel or RowwiseParallel between Replicate() and Shard(-1)."
    )
