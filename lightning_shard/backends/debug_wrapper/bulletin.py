"""The board on which the ranks of one group post their calls: keys of their own in its store.

checked/<n>/                          n-th group of this name on each rank
    call/<number>/<rank>              fingerprint of a collective; gone two numbers later
    message/<from>/<to>/<tag>/<k>     fingerprint of a send; gone when it is received
    problem                           what the ranks disagree on, once they do
    told/<rank>                       this rank knows of the problem

A rank shows its peers the fingerprint of a call, and calls are compared by it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import Call, describe_tensor, message_key, mismatch_error
from lightning_shard.errors import RankFailedError

TensorSummary = tuple[str, int, str]
"""A tensor that goes from one rank to another: dtype, number of elements, description."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A rank's call, as its peers see it.

    Attributes:
        agreed: The properties of the call that must be equal on every rank.
        gives: By group rank, the tensor given to it, where `agreed` does not tell.
        takes: By group rank, the tensor that this rank has room for from that one.
    """

    agreed: str
    operation: str
    site: str
    gives: dict[str, TensorSummary] = field(default_factory=dict)
    takes: dict[str, TensorSummary] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, size: int) -> Self:
        """Take the fingerprint of a call in a group of `size` ranks."""
        # A message fits its receive when the tensors do; which is which, and the peer, differ.
        agreed = call.agreed if call.tag is None else message_key(call.inputs or call.outputs)
        return cls(
            agreed=repr(agreed),
            operation=str(call),
            site=f"{call.site}{_thread_note()}",
            gives=_summaries(_given(call, size)),
            takes=_summaries(_taken(call)),
        )

    def encode(self) -> str:
        """Bring into the form that `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Read what `encode` wrote."""
        return cls(**json.loads(text))


def find_misfit(calls: Sequence[Fingerprint]) -> tuple[int, int, str] | None:
    """Return two group ranks that disagree, and on what; None when the calls fit together."""
    for rank, call in enumerate(calls):
        if call.agreed != calls[0].agreed:
            return rank, 0, ""
    for source, giver in enumerate(calls):
        for target, summary in giver.gives.items():
            room = calls[int(target)].takes.get(str(source))
            if room is not None and room[:2] != summary[:2]:
                what = (
                    f"rank {source} of the group gives {summary[2]}, but rank {target} of the "
                    f"group has room for {room[2]} there"
                )
                return source, int(target), what
    return None


def _given(call: Call, size: int) -> dict[int, Tensor]:
    match call.op:
        case "all_gather":
            return dict.fromkeys(range(size), call.inputs[0])
        case "gather":
            return {call.root: call.inputs[0]}
        case "scatter" | "all_to_all" | "all_to_all_single":
            return dict(enumerate(call.inputs))
    return {}


def _taken(call: Call) -> dict[int, Tensor]:
    match call.op:
        case "scatter":
            return {call.root: call.outputs[0]}
        case "all_gather" | "gather" | "all_to_all" | "all_to_all_single":
            return dict(enumerate(call.outputs))
    return {}


def _summaries(tensors: dict[int, Tensor]) -> dict[str, TensorSummary]:
    # Lists and string keys are what comes back from JSON.
    return {
        str(rank): (str(tensor.dtype), tensor.numel(), describe_tensor(tensor))
        for rank, tensor in tensors.items()
    }


def _thread_note() -> str:
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else f" in thread {thread.name!r}"


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
    """The board of one group, as one rank reads and writes it; made once for each group."""

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
        """Return once `ready()`; the store's own `wait` would keep its connection from threads."""
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
        """Return unless the ranks of this group are known to disagree."""
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
