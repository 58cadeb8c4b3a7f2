"""What of a checkpoint does not fit, said so that a reader knows what to do about it.

Formats of one kind are exchanged as torch does, without a word: a checkpoint in bfloat16 loads into
a model in float32. What would lose its meaning, numbers with a fraction as integers or complex
numbers as real ones, is a misfit.
"""

from collections.abc import Sequence

import torch

from lightning_shard.errors import CheckpointError

_MOST_TOLD = 8


def kind_of(dtype: torch.dtype) -> str:
    """Say what kind of numbers a format holds; torch may exchange formats of one kind."""
    if dtype.is_complex:
        return "complex"
    return "floating-point" if dtype.is_floating_point else "integer"


def dtype_misfit(what: str, got: torch.dtype, expected: torch.dtype) -> str | None:
    """Say that numbers of one kind are to become those of another; None when they are not."""
    if kind_of(got) == kind_of(expected):
        return None
    return f"{what} is of {got}, expected {kind_of(expected)} numbers as {expected}"


def shape_misfit(what: str, got: Sequence[int], expected: Sequence[int]) -> str | None:
    """Say that a tensor has another shape than expected; None when it has not."""
    if tuple(got) == tuple(expected):
        return None
    return f"{what} has shape {tuple(got)}, expected {tuple(expected)}"


def misfit_error(owner: str, misfits: Sequence[str], advice: str) -> CheckpointError:
    """Make the error of a checkpoint that does not fit.

    Args:
        owner: What it was to be loaded into.
        misfits: What does not fit, each without a full stop.
        advice: What to do, as sentences.
    """
    told = "; ".join(misfits[:_MOST_TOLD])
    more = f"; and {len(misfits) - _MOST_TOLD} more" if len(misfits) > _MOST_TOLD else ""
    return CheckpointError(
        f"The checkpoint does not fit {owner}, and nothing of it was loaded: {told}{more}. {advice}"
    )
