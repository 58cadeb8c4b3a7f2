"""The comparison of one group's collectives between its ranks, by their number."""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from lightning_shard.backends.calls import Call, tensor_key
from lightning_shard.backends.debug_wrapper.bulletin import Bulletin
from lightning_shard.backends.debug_wrapper.fingerprint import Fingerprint, find_misfit
from lightning_shard.backends.group_handle import CoalescedWork
from lightning_shard.backends.mismatch import Side, describe_disagreement
from lightning_shard.backends.python_group import PythonGroup


class Comparer(PythonGroup):
    """A group whose operations move nothing: each returns once every rank has called the same.

    Args:
        name: Name of the group in c10d.
        bulletin: Board of the group, on which the ranks post their calls.
    """

    backend_name: ClassVar[str] = "comparer"

    def __init__(self, name: str, bulletin: Bulletin) -> None:
        super().__init__(name, bulletin.global_ranks, bulletin.rank)
        self._bulletin = bulletin
        self._number = 0
        self._turn = threading.RLock()
        self._in_turn = ""
        self._overlap = ""
        self._sites_seen: set[tuple[str, ...]] = set()

    def compare(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        reduce_op: Any = None,
    ) -> None:
        """Return once every rank has called this operation, with tensors of these shapes and types.

        Raises:
            CollectiveMismatchError: A rank has called another operation.
            RankFailedError: A rank has failed, or has not come in time.
        """
        key = (tensor_key(inputs), tensor_key(outputs))
        with self.turn():
            self._post(op, inputs, outputs, agreed=key, reduce_op=reduce_op)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time compare and start its operation, in the order of its numbers."""
        name = threading.current_thread().name
        if not self._turn.acquire(blocking=False):
            self._overlap = (
                f"Threads {self._in_turn!r} and {name!r} of rank {self._bulletin.global_rank} "
                "called at the same time: their order is not the same on every rank. Call from "
                "one thread, or give each a group of its own."
            )
            self._turn.acquire()
        try:
            self._in_turn = name
            yield
        finally:
            self._turn.release()

    @override
    def _start(self, call: Call) -> Work:
        board, mine = self._bulletin, Fingerprint.of(call, self.size())
        board.raise_known_problem(f"{mine.operation} at {mine.site}")
        self._number += 1
        board.post(self._key(self._number, board.rank), mine)
        keys = [self._key(self._number, rank) for rank in range(self.size())]
        place = f"{mine.operation} at {mine.site}"
        board.wait_until(lambda: board.holds(*keys), place, lambda: self._describe_late(mine))
        calls = board.read(keys)
        # Who has posted this number has read all of the last one, so nobody reads the one before.
        board.remove(self._key(self._number - 2, board.rank))
        self._compare(calls)
        return CoalescedWork([])

    def _compare(self, calls: list[Fingerprint]) -> None:
        misfit = find_misfit(calls)
        if misfit is None:
            self._compare_sites(calls)
            return
        got, expected = (self._side(rank, calls[rank]) for rank in misfit[:2])
        board = self._bulletin
        problem = describe_disagreement(
            board.group, self._number, got=got, expected=expected, what=misfit[2]
        )
        board.announce("\n".join(filter(None, (problem, self._overlap))))
        mine = calls[board.rank]
        board.raise_problem(f"{mine.operation} of {board.group} at {mine.site}")

    def _compare_sites(self, calls: list[Fingerprint]) -> None:
        """Warn once of each set of differing call sites: a branch by rank is often a mistake."""
        sites = tuple(call.site for call in calls)
        if self._bulletin.rank or len(set(sites)) == 1 or sites in self._sites_seen:
            return
        self._sites_seen.add(sites)
        places = "".join(
            f"\n  rank {rank}: {site}" for rank, site in zip(self.global_ranks, sites, strict=True)
        )
        warnings.warn(
            f"Ranks of {self._bulletin.group} called its operation number {self._number}, "
            f"{calls[0].operation}, from different places:{places}\nThey agree in all that can be "
            "compared, so it goes on; look whether they mean the same data.",
            stacklevel=2,
        )

    def _describe_late(self, mine: Fingerprint) -> str:
        board = self._bulletin
        lines = [
            f"  rank {board.global_ranks[rank]}: {self._describe_last(rank)}"
            for rank in range(self.size())
            if not board.holds(self._key(self._number, rank))
        ]
        report = "\n".join(filter(None, (*lines, self._overlap)))
        return (
            f"Rank {board.global_rank} has waited {board.timeout} in {mine.operation}, number "
            f"{self._number} of {board.group} at {mine.site}. These ranks have not come to it:\n"
            f"{report}\nLook for a rank that returned early, took another branch, or waits in "
            "another group; raise the timeout where a rank may compute for so long."
        )

    def _describe_last(self, rank: int) -> str:
        last = self._key(self._number - 1, rank)
        if not self._bulletin.holds(last):
            return "has not called anything in this group"
        call = self._bulletin.read([last])[0]
        return f"its last one was {call.operation} at {call.site}"

    def _side(self, rank: int, call: Fingerprint) -> Side:
        return Side(rank=self.global_ranks[rank], operation=call.operation, site=call.site)

    def _key(self, number: int, rank: int) -> str:
        return f"call/{number}/{rank}"
