"""Messages that say what of a checkpoint does not fit, and what to do about it.

Formats of one kind are exchanged as torch does, without a word: a checkpoint in bfloat16 loads into
a model in float32. A conversion that would lose meaning, of numbers with a fraction to integers or
of complex numbers to real ones, is a misfit.
"""

from collections.abc import Sequence

import torch

from lightning_shard.errors import CheckpointError

WEIGHTS_ADVICE = (
    "Load it into the model that it was saved from, with the same settings; names that differ on "
    "purpose are left out with LightningModule.strict_loading = False."
)
_MOST_TOLD = 8


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of numbers that a format holds; torch converts formats of one kind."""
    if dtype.is_complex:
        return "complex"
    return "floating-point" if dtype.is_floating_point else "integer"


def dtype_misfit(what: str, got: torch.dtype, expected: torch.dtype) -> str | None:
    """Return the misfit of numbers that would become another kind; None for one kind."""
    if kind_of(got) == kind_of(expected):
        return None
    return f"{what} is of {got}, expected {kind_of(expected)} numbers as {expected}"


def shape_misfit(what: str, got: Sequence[int], expected: Sequence[int]) -> str | None:
    """Return the misfit of a tensor with another shape than expected; None for the same."""
    if tuple(got) == tuple(expected):
        return None
    return f"{what} has shape {tuple(got)}, expected {tuple(expected)}"


def misfit_error(
    owner: str, misfits: Sequence[str], advice: str, loaded: str = "nothing of it was"
) -> CheckpointError:
    """Make the error of a checkpoint that does not fit.

    Args:
        owner: Name of the object that the checkpoint was to be loaded into.
        misfits: Messages of what does not fit, each without a full stop.
        advice: Sentences that tell the user what to do.
        loaded: Says what was loaded of it all the same.
    """
    told = "; ".join(misfits[:_MOST_TOLD])
    more = f"; and {len(misfits) - _MOST_TOLD} more" if len(misfits) > _MOST_TOLD else ""
    return CheckpointError(
        f"The checkpoint does not fit {owner}, and {loaded} loaded: {told}{more}. {advice}"
    )
