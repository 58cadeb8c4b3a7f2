"""The styles by which a plan says how a layer is split.

    style                     weight is cut       takes          gives
    colwise                   by outputs          full           features
    colwise_gather_output     by outputs          full           full
    colwise_parted            by outputs          full           full, gathered only if need be
    rowwise                   by inputs           features       full (a sum over ranks)
    rowwise_split_input       by inputs           full           full (a sum over ranks)
    embedding_rowwise         by vocabulary       all ids        full (a sum over ranks)
    embedding_colwise         by features         all ids        full
    packed_colwise(n)         n fused matrices, each by outputs; as colwise
    packed_colwise_parted(n)  the same, as colwise_parted
    shared_tail(n)            not at all: a layer whose last n features all heads use as they are
    shared_heads(n)           not at all: each of the n heads of keys or values, which are fewer
                              than the ranks, is computed by several; as colwise
    attention                 torch's MultiheadAttention as a whole, by heads
    replicated_with_grad_allreduce
                              not at all: a layer within a region, such as a norm of each head

An activation is *full* when every rank has all of it, and in *features* when each has its part of
the last dimension. A parted activation looks full, and `rowwise_split_input` takes it as it is. The
names are those of Hugging Face's `tp_plan`; `colwise_rep`, `rowwise_rep` and torch's style objects
mean the same, and `colwise_logits` is `colwise_parted`.
"""

import difflib
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_shard.errors import ConfigError

Form = Literal[
    "colwise",
    "rowwise",
    "vocab",
    "attention",
    "experts",
    "shared",
    "replica",
    "unsplit",
    "unsplit_shared",
    "shared_tail",
]


@dataclass(frozen=True, kw_only=True)
class ParameterCut:
    """The cut of one parameter of a layer."""

    name: str
    dim: int
    num_blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class Style:
    """The split of one layer."""

    form: Form
    num_blocks: int = 1
    full_input: bool = True
    full_output: bool = True
    lazy_output: bool = False
    cuts: tuple[ParameterCut, ...] = ()


STYLES: dict[str, Style] = {
    "colwise": Style(form="colwise", full_output=False),
    "colwise_gather_output": Style(form="colwise"),
    "colwise_parted": Style(form="colwise", lazy_output=True),
    "rowwise": Style(form="rowwise", full_input=False),
    "rowwise_split_input": Style(form="rowwise"),
    "embedding_rowwise": Style(form="vocab"),
    "embedding_colwise": Style(form="colwise"),
    "attention": Style(form="attention"),
    "replicated_with_grad_allreduce": Style(form="replica", full_input=False, full_output=False),
}
_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "colwise_logits": "colwise_parted",
    "rowwise_rep": "rowwise_split_input",
}
_OF_BLOCKS = {
    "packed_colwise": Style(form="colwise", full_output=False),
    "packed_colwise_parted": Style(form="colwise", lazy_output=True),
    "shared_heads": Style(form="shared", full_output=False),
    "shared_tail": Style(form="shared_tail"),
}
_COUNTED = re.compile(rf"({'|'.join(_OF_BLOCKS)})\((\d+)\)")


def style_of(value: Any, pattern: str) -> Style:
    """Return the style that a plan's entry means."""
    if isinstance(value, Style):
        return value
    if isinstance(value, str):
        return _named(value, pattern)
    return _of_torch(value, pattern)


def style_name(style: Style) -> str:
    """Return a style's name in a plan, or its form where it has none."""
    counted = {
        f"{name}({style.num_blocks})": replace(one, num_blocks=style.num_blocks)
        for name, one in _OF_BLOCKS.items()
    }
    known = (STYLES | counted).items()
    return next((name for name, one in known if one == style), style.form)


def _named(name: str, pattern: str) -> Style:
    name = _ALIASES.get(name, name)
    if name in STYLES:
        return STYLES[name]
    if (counted := _COUNTED.fullmatch(name)) is not None:
        return replace(_OF_BLOCKS[counted[1]], num_blocks=int(counted[2]))
    known = [*STYLES, *_ALIASES, "packed_colwise(3)", "shared_heads(1)"]
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
        full = {Replicate(): True, Shard(-1): False}
        taken, given = full.get(value.input_layouts[0]), full.get(value.output_layouts[0])
        if taken is not None and given is not None:
            if not given and not value.use_local_output:  # it would look full, as a DTensor
                return Style(form=form, full_input=taken, lazy_output=True)
            return Style(form=form, full_input=taken, full_output=given)
    raise ConfigError(
        f"The plan's entry {pattern!r} is {value!r}, expected a style's name ({', '.join(STYLES)}) "
        f"or a ColwiseParallel or RowwiseParallel between Replicate() and Shard(-1)."
    )
