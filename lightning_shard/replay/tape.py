"""The results of one rank's calls of collectives, in the order in which it made them.

    recorded     all_reduce -> 8 numbers     recv -> 4 numbers     send     recv, unfinished
    replayed     the rank makes the same calls in the same order, and is given the same results

The rank is alone then: nobody answers but the tape. A call that had no result, because a peer had
failed, raises that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_shard.data_parallel.host_copies import host_copy
from lightning_shard.errors import CheckpointError, RankFailedError

WITHOUT_RESULT = ("send", "barrier", "monitored_barrier")
"""Operations that write nothing."""


@dataclass(kw_only=True)
class Result:
    """One call and what it wrote.

    Attributes:
        operation: Name of the operation, as in `backends.calls.Call`.
        tensors: What it wrote, in host memory; None if it did not come to its end.
    """

    operation: str
    tensors: list[Tensor] | None = None


@dataclass(kw_only=True)
class Tape:
    """Results to be given out again, one after the other.

    Attributes:
        rank: Rank of the run that the results are of.
        results: The recorded results.
        is_cut_short: Whether a peer's failure ended them: the rank heard of it before a call.
        is_playing: Whether calls are answered by the tape; else as if all peers were copies.
    """

    rank: int
    results: Sequence[Result]
    is_cut_short: bool = False
    is_playing: bool = False
    _number: int = field(default=0, init=False)

    def next(self, operation: str, written: Any) -> Callable[[], None]:
        """Take the next place on the tape, and return what writes its result.

        Args:
            operation: Name of the operation that is called.
            written: The tensors that it writes, in any nesting.

        Raises:
            CheckpointError: Another call was recorded at this place, or none.
        """
        targets = tensors_in(written)
        number, self._number = self._number, self._number + 1
        found = self.results[number] if number < len(self.results) else None
        if found is None and self.is_cut_short:
            found = Result(operation=operation)
        if found is None or found.operation != operation or not _fit(found.tensors, targets):
            what = "no more" if found is None else f"{found.operation} {_shapes(found.tensors)}"
            raise CheckpointError(
                f"Rank {self.rank}: the replay calls {operation} {_shapes(targets)} as operation "
                f"{number}, expected {what} as recorded: the step goes another way here. Take the "
                f"module, the strategy's options and the callbacks of the recorded run."
            )

        def deliver() -> None:
            if found.tensors is None:
                raise RankFailedError(
                    f"Rank {self.rank}: {operation}, operation {number} of the record, had no "
                    f"result: a peer had failed, or never came."
                )
            with torch.no_grad():
                for target, value in zip(targets, found.tensors, strict=True):
                    target.data.copy_(value.view_as(target))

        return deliver


def tensors_in(written: Any) -> list[Tensor]:
    """Return the tensors in any nesting of lists."""
    return [one for one in tree_leaves(written) if isinstance(one, Tensor)]


def copies(written: Any) -> list[Tensor]:
    """Return copies of the tensors in any nesting, in host memory."""
    return [host_copy(one) for one in tensors_in(written)]


def _fit(found: Sequence[Tensor] | None, targets: Sequence[Tensor]) -> bool:
    if found is None:
        return True
    return [one.numel() for one in found] == [one.numel() for one in targets]


def _shapes(tensors: Sequence[Tensor] | None) -> str:
    return str([tuple(one.shape) for one in tensors or ()])


def plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return results as plain values, for a file."""
    return [vars(one) for one in results]


def from_plain(values: Sequence[dict[str, Any]]) -> Iterator[Result]:
    """Yield results of plain values."""
    return (Result(**one) for one in values)
