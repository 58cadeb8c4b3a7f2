"""The board on which the ranks of one group post their calls: keys of their own in its store.

checked/<n>/                          n-th group of this name on each rank
    call/<number>/<rank>              fingerprint of a collective; gone two numbers later
    message/<from>/<to>/<tag>/<k>     fingerprint of a send; gone when it is received
    problem                           what the ranks disagree on, once they do
    told/<rank>                       this rank knows of the problem
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import mismatch_error
from lightning_shard.backends.debug_wrapper.fingerprint import Fingerprint
from lightning_shard.errors import RankFailedError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.005
# The store ends with the process that serves it: the others must have read what it holds.
_FAREWELL_SECONDS = 5.0


def growing_pauses() -> Iterator[float]:
    """Yield seconds to sleep between two looks: short at first, a moment in the end."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


class Bulletin:
    """The board of one group, as one rank reads and writes it.

    Args:
        store: The group's own store; every rank must make its board once for each group.
        global_ranks: Global ranks of the group's members, in order of their group rank.
        rank: This rank's number in the group.
        timeout: How long to wait for a peer.
        described_group: The group's name and ranks in words, for error messages.
    """

    def __init__(
        self,
        store: Store,
        global_ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        described_group: str,
    ) -> None:
        self.global_ranks, self.rank, self.group = global_ranks, rank, described_group
        self.timeout = timeout
        generation = store.add(f"checked/generation/{rank}", 1)
        self._store = PrefixStore(f"checked/{generation}", store)
        self._problem = ""

    def reconnected(self) -> Self:
        """Return the same board over a connection of its own, for another thread."""
        other = copy(self)
        store: Any = self._store
        other._store = store.clone()
        return other

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.global_ranks[self.rank]

    # --- fingerprints --------------------------------------------------------------------------

    def post(self, key: str, fingerprint: Fingerprint) -> None:
        """Post the fingerprint of one of this rank's calls."""
        self._store.set(key, fingerprint.encode())

    def read(self, keys: Sequence[str]) -> list[Fingerprint]:
        """Return fingerprints that have been posted."""
        return [Fingerprint.decode(text) for text in self._store.multi_get(list(keys))]

    def holds(self, *keys: str) -> bool:
        """Whether a fingerprint is posted under each of these keys."""
        return self._store.check(list(keys))

    def remove(self, key: str) -> None:
        """Take a fingerprint down."""
        self._store.delete_key(key)

    # --- waiting -------------------------------------------------------------------------------

    def wait_until(
        self, ready: Callable[[], bool], operation: str, late: Callable[[], str]
    ) -> None:
        """Return once `ready()`; ask again and again, ever more slowly.

        The store's own `wait` would keep other threads from its connection, and prints a warning
        whenever it ends without a result.

        Args:
            ready: Returns whether the wait is over.
            operation: Name of the operation that this rank is in, for errors.
            late: Returns the error's text when the time is up: which ranks have not come.

        Raises:
            CollectiveMismatchError: The ranks of the group disagree.
            RankFailedError: A rank has failed, or the time is up.
        """
        deadline, pauses = time.monotonic() + self.timeout.total_seconds(), growing_pauses()
        try:
            while not ready():
                time.sleep(next(pauses))
                self.raise_problem(operation)
                if (lifeline := liveness.current()) is not None:
                    lifeline.check(operation)
                if time.monotonic() > deadline:
                    raise RankFailedError(late())
        except dist.DistNetworkError as error:
            raise RankFailedError(
                f"Rank {self.global_rank} cannot go on with {operation}: the store through which "
                "the ranks compare their calls is gone, and so is the rank that served it, which "
                f"is rank 0 as a rule. Look for its first error. torch said: {error}"
            ) from error

    # --- disagreement --------------------------------------------------------------------------

    def announce(self, problem: str) -> None:
        """Tell all ranks of the group what they disagree on."""
        self._problem = problem
        self._store.set("problem", problem)

    def raise_problem(self, operation: str) -> None:
        """Return unless the ranks of this group are known to disagree.

        Raises:
            CollectiveMismatchError: The ranks disagree; the group can only be made anew.
        """
        if not self._problem and self._store.check(["problem"]):
            self._problem = self._store.get("problem").decode()
        if self._problem:
            self._raise(operation)

    def raise_known_problem(self, operation: str) -> None:
        """Raise as `raise_problem` does, but only a problem that this rank has read already."""
        if self._problem:
            self._raise(operation)

    def _raise(self, operation: str) -> NoReturn:
        self.meet_briefly("told")
        raise mismatch_error(self._problem, self.global_rank, operation)

    def meet_briefly(self, occasion: str) -> None:
        """Wait a few seconds for the other ranks to come here as well; go on if they do not."""
        deadline = time.monotonic() + min(_FAREWELL_SECONDS, self.timeout.total_seconds())
        keys, pauses = (
            [f"{occasion}/{rank}" for rank in range(len(self.global_ranks))],
            growing_pauses(),
        )
        try:
            self._store.set(keys[self.rank], "")
            while time.monotonic() < deadline and not self.holds(*keys):
                time.sleep(next(pauses))
                if (lifeline := liveness.current()) is not None:
                    lifeline.check(occasion)
        except (dist.DistError, RankFailedError):
            return  # who served the store has left, or a rank has failed: nobody else will come
