"""An operation in flight, and what a dead peer looks like from here."""

import re
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.call_site import find_call_site, purpose
from lightning_shard.errors import RankFailedError

# What Gloo, NCCL and the store say when a peer has gone; anything else is not about a peer.
_PEER_GONE = re.compile(
    r"closed by peer|connection (was )?(reset|refused|closed)|broken pipe|timed? ?out|"
    r"pair closure|not connected|socket (error|timeout)|remote process|nccl error",
    re.IGNORECASE,
)
_NO_PEER = ("DataLoader ", "CUDA error")  # these time out by themselves


class OperationContext(NamedTuple):
    """The operation in flight and its rank, for error messages and counters."""

    operation: str
    rank: int
    size: int
    traffic: Traffic


class StartedTransfer(NamedTuple):
    """A transfer that has begun; `finish` runs once, after its works, on the waiting thread."""

    works: Sequence[dist.Work] = ()
    finish: Callable[[], None] | None = None


class Pending:
    """A handle on an operation in flight.

    Until `wait` returns, the operation's tensors belong to it: do not write its input, do not read
    its output. On CUDA, `wait` orders the current stream and does not block the host, as in c10d.
    """

    def __init__(self, transfer: StartedTransfer, place: OperationContext) -> None:
        self._transfer: StartedTransfer | None = transfer
        self._place = place

    @property
    def done(self) -> bool:
        """Whether `wait` has returned."""
        return self._transfer is None

    def is_ready(self) -> bool:
        """Whether `wait` would return, or raise, at once; Gloo's receives do not know before."""
        return self._transfer is None or all(work.is_completed() for work in self._transfer.works)

    def wait(self) -> None:
        """Finish the operation; a second call does nothing.

        Raises:
            RankFailedError: A peer has died, or has said nothing for the group's time-out.
        """
        if self._transfer is None:
            return
        with Span(self._place) as span:
            for work in self._transfer.works:
                work.wait()
            span.has_waited()
            if self._transfer.finish is not None:
                self._transfer.finish()
        self._transfer = None


class Span:
    """Times one span of an operation; the transport's error about a lost peer becomes ours."""

    __slots__ = ("_begin", "_lifeline", "_place", "_waited")

    def __init__(self, place: OperationContext) -> None:
        self._place = place
        self._waited = 0.0
        self._lifeline = liveness.current()

    def __enter__(self) -> "Span":
        if self._lifeline is not None:
            self._lifeline.entered(self._place.operation)
        self._begin = perf_counter()
        return self

    def has_waited(self) -> None:
        """Count the time since the span began as waiting for peers."""
        self._waited = perf_counter() - self._begin

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        seconds = perf_counter() - self._begin
        self._place.traffic.spend(self._place.operation, seconds, waited=self._waited)
        try:
            if isinstance(error, RuntimeError) and is_about_a_peer(error):
                raise _lost_peer(self._place, error) from error
        finally:
            if self._lifeline is not None:
                self._lifeline.left()


def is_about_a_peer(error: BaseException) -> bool:
    """Whether an error is one that a transport raises when a peer has gone."""
    if not isinstance(error, RuntimeError) or str(error).startswith(_NO_PEER):
        return False
    return isinstance(error, dist.DistError) or _PEER_GONE.search(str(error)) is not None


def _lost_peer(place: OperationContext, error: RuntimeError) -> RankFailedError:
    lifeline = liveness.current()
    if lifeline is not None:
        explained = lifeline.explain(place.operation)
    else:
        explained = RankFailedError(
            f"Rank {place.rank} of {place.size} lost a peer in {place.operation}: a rank of its "
            "group died, or said nothing for the group's time-out. Look for the first error among "
            "the other ranks' output; this rank only noticed."
        )
    # A peer may have died of a message that it did not expect.
    site = f"This rank called it at {find_call_site()}. " if purpose() else ""
    return RankFailedError(f"{explained} {site}The transport said: {error}")
