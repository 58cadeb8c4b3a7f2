"""An operation in flight, and what a dead peer looks like from here."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends.traffic import Traffic
from lightning_shard.errors import RankFailedError

# What Gloo, NCCL and the store say when a peer has gone; anything else is not about a peer.
_PEER_GONE = re.compile(
    r"closed by peer|connection (was )?(reset|refused|closed)|broken pipe|timed? ?out|"
    r"pair closure|not connected|socket (error|timeout)|remote process|nccl error",
    re.IGNORECASE,
)
_NO_PEER = ("DataLoader ", "CUDA error")  # these time out by themselves


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who is doing what, for error messages and counters."""

    operation: str
    rank: int
    size: int
    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What moves, and what is left to do once it has moved.

    Attributes:
        works: c10d handles, waited for in this order.
        finish: Runs once, on the waiting thread, after all of `works`: local sums, copies.
    """

    works: Sequence[dist.Work] = ()
    finish: Callable[[], None] | None = None


class Pending:
    """A handle on an operation in flight.

    Until `wait` returns, the operation's tensors belong to it: do not write its input, do not read
    its output. On CUDA, `wait` orders the current stream and does not block the host, as in c10d.
    """

    def __init__(self, transfer: Transfer, place: Place) -> None:
        self._transfer: Transfer | None = transfer
        self._place = place

    @property
    def done(self) -> bool:
        """Whether `wait` has returned."""
        return self._transfer is None

    def wait(self) -> None:
        """Finish the operation; a second call does nothing.

        Raises:
            RankFailedError: A peer has died, or has said nothing for the group's time-out.
        """
        if self._transfer is None:
            return
        with peer_failures(self._place):
            with timed(self._place, waiting=True):
                for work in self._transfer.works:
                    work.wait()
            if self._transfer.finish is not None:
                with timed(self._place):
                    self._transfer.finish()
        self._transfer = None


@contextmanager
def timed(place: Place, *, waiting: bool = False) -> Iterator[None]:
    """Charge the time spent inside to the operation's counter, as waiting for peers or as work."""
    start = perf_counter()
    try:
        yield
    finally:
        seconds = perf_counter() - start
        place.traffic.spend(place.operation, seconds, waited=seconds if waiting else 0.0)


@contextmanager
def peer_failures(place: Place) -> Iterator[None]:
    """Turn what the transport says of a lost peer into a RankFailedError; let the rest pass.

    With a lifeline the error says which peer that was, and comes before the operation when the
    peer is known to have failed already.
    """
    lifeline = liveness.current()
    if lifeline is not None:
        lifeline.entered(place.operation)
    try:
        yield
    except RuntimeError as error:
        if not is_about_a_peer(error):
            raise
        raise _lost_peer(place, error) from error
    finally:
        if lifeline is not None:
            lifeline.left()


def is_about_a_peer(error: BaseException) -> bool:
    """Say whether an error is what a transport says when a peer has gone."""
    if not isinstance(error, RuntimeError) or str(error).startswith(_NO_PEER):
        return False
    return isinstance(error, dist.DistError) or _PEER_GONE.search(str(error)) is not None


def _lost_peer(place: Place, error: RuntimeError) -> RankFailedError:
    lifeline = liveness.current()
    if lifeline is not None:
        explained = lifeline.explain(place.operation)
    else:
        explained = RankFailedError(
            f"Rank {place.rank} of {place.size} lost a peer in {place.operation}: a rank of its "
            "group died, or said nothing for the group's time-out. Look for the first error among "
            "the other ranks' output; this rank only noticed."
        )
    return RankFailedError(f"{explained} The transport said: {error}")
