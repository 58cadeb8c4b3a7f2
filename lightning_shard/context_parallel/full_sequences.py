"""Which operations of a block have needed the full sequence, each told once."""

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn


class FullSequences:
    """Notes the operations that ranks compute on full sequences.

    Args:
        num_ranks: Ranks that share a sequence.

    Attributes:
        block: Name of the block that runs; None outside of blocks.
        noted: Names of the operations so far, with the block that was the first to call each.
    """

    def __init__(self, num_ranks: int) -> None:
        self.block: str | None = None
        self.noted: dict[str, str] = {}
        self._num_ranks = num_ranks

    def note(self, func: Callable[..., Any]) -> None:
        """Hear of an operation, and warn of it where it is the first of its name."""
        name = getattr(func, "__name__", "") or str(func)
        if self.block is None or name in self.noted:
            return
        self.noted[name] = self.block
        rank_zero_warn(
            f"The block {self.block!r} calls {name!r}, which has no rule for a part of a sequence: "
            f"each of the {self._num_ranks} context-parallel ranks computes it on the full "
            f"sequence. The result is the same; the memory and time of it are those of one rank."
        )
