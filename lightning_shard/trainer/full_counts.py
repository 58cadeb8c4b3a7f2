"""Lets Lightning's model summaries count full parameters where a rank has a part of each, or none.

A summary that is made in a hook counts what it sees. It touches the private names of Lightning's
summaries, checked with lightning 2.6; `tests/trainer/test_full_counts.py` fails when one changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from lightning.pytorch.utilities.model_summary.model_summary import (
    LayerSummary,
    ModelSummary,
    _tensor_has_shape,
)
from torch import nn

_FULL_NUMEL = "_lightning_shard_full_numel"  # set on parameters that are parts


@contextmanager
def counted_full(shapes: Mapping[nn.Parameter, Sequence[int]]) -> Iterator[None]:
    """Let summaries that are made inside count parameters by these full shapes."""
    for param, shape in shapes.items():
        vars(param)[_FULL_NUMEL] = prod(shape)
    try:
        yield
    finally:
        for param in shapes:
            vars(param).pop(_FULL_NUMEL, None)


def count_full_parameters() -> None:
    """Have Lightning's summaries ask how large a parameter is that is a part."""
    _count_full(LayerSummary, "num_parameters", "_module")
    _count_full(ModelSummary, "total_parameters", "_model")
    _count_full(ModelSummary, "trainable_parameters", "_model", trained_only=True)


def _count_full(kind: type, name: str, of: str, *, trained_only: bool = False) -> None:
    def count(summary: Any) -> int:
        params = getattr(summary, of).parameters()
        return sum(_numel(one) for one in params if one.requires_grad or not trained_only)

    setattr(kind, name, property(count))


def _numel(param: nn.Parameter) -> int:
    full: int | None = vars(param).get(_FULL_NUMEL)
    if full is not None:
        return full
    return 0 if _tensor_has_shape(param) else param.numel()  # true of one without a shape


count_full_parameters()
