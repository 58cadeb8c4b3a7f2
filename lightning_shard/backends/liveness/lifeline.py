"""One rank's end of the lifeline: what its own threads ask, and what the hub has said.

    main thread                    Lifeline                     lifeline thread
    entered, left ───────────────> what it is doing ──────────> beats to the hub
    check, explain <────────────── the verdict <─────────────── verdict from the hub,
    step <──────────────────────── where to stop <───────────── or the hub's own end

Asking costs an attribute read for as long as nobody has failed.
"""

import contextlib
import math
import os
import platform
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition
from time import monotonic
from typing import Any

from lightning_shard.backends.authentication.connection import Message
from lightning_shard.backends.liveness.server import (
    NO_STEP,
    Activity,
    LivenessVerdict,
    Table,
    failure_message,
    late_message,
)
from lightning_shard.core import settings
from lightning_shard.core.call_site import find_call_site, purpose
from lightning_shard.errors import RankFailedError

_LONGEST_EVENT = 500
_LONG_SECONDS = 2.0  # after which others are told the line, too
_LONGEST_BEAT_SECONDS = 5.0
_FIRST_BEAT_SECONDS = 0.25
_LEAVING_SECONDS = 5.0
_ENDING_SECONDS = 10.0  # in which the main thread hears of a verdict after SIGTERM
KEPT = 64
"""How many beginnings and ends of operations a rank remembers."""


def write_stacks(
    rank: int, world_size: int, reason: str, recent: Iterable[Activity], now: float
) -> str:
    """Write this rank's last operations and all its threads' stacks into a new file of its own.

    A time-out says which rank was missed; why it did not come stands in that rank's own stacks.
    """
    lines = [
        f"rank {rank} of {world_size}, process {os.getpid()} on {platform.node()}: {reason}",
        "",
        "Its last operations:",
        *(f"  {_told(one, now)}" for one in recent),
        "",
        *_stacks(),
    ]
    try:
        number, path = tempfile.mkstemp(prefix=f"lightning-shard-rank-{rank}-", suffix=".txt")
        with open(number, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError:
        return ""
    return path


def _told(activity: Activity, now: float) -> str:
    does = "began" if activity.inside else "ended"
    ago = max(0.0, now - activity.since)
    return f"{ago:9.3f} s ago  {does} {activity.operation} (its operation {activity.number})"


def _stacks() -> Iterable[str]:
    names = {one.ident: one.name for one in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"Thread {names.get(ident, ident)}, most recent call last:"
        yield "".join(traceback.format_stack(frame))


class Lifeline:
    """One rank's end of the lifeline: what it knows of the others and tells the hub.

    `interrupt` ends what this process waits for in its groups; it is called once, on a verdict.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        silence_seconds: float,
        send: Callable[[Message], None],
        interrupt: Callable[[], None],
        now: float,
        met_anew: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.was_terminated = False
        self.requeue_signal = 0
        self.requeues = False
        self.has_told_of_operations = False
        self._silence_seconds = silence_seconds
        self._send = send
        self._interrupt = interrupt
        self._activity = Activity("meeting anew" if met_anew else "", since=now)
        self._recent: deque[Activity] = deque(maxlen=KEPT)
        self._stacks = ""  # the file in which they stand, from a time-out on
        self._verdict: LivenessVerdict | None = None
        self._table: Table = {}
        self._all_have_come = False
        self._hub_has_left = False
        self._has_announced_requeue = False
        self._steps = 0
        self._meets_anew = met_anew  # where a loss is no end
        self._main = threading.current_thread()
        self._ends_at = math.inf  # unless the main thread hears of the verdict
        self.terminated_rank: int | None = None  # the first sent SIGTERM or SLURM's signal
        self._stop_step: int | None = None
        self._failing: int | None = None  # after how many operations a peer has raised
        self._all_raised = False
        self._news = Condition()  # guards all of these

    # --- asked by the threads that train --------------------------------------------------------

    def await_all(self, seconds: float) -> None:
        """Wait until every rank has come; one that leaves at once is then missed by nobody."""
        with self._news:
            self._news.wait_for(lambda: self._all_have_come or self.has_verdict, seconds)
            self.check("the start")
            if not self._all_have_come:
                raise self.explain("the start")

    def entered(self, operation: str) -> None:
        """Note that this rank begins `operation`, or waits for it; check first."""
        if self._verdict is not None:
            self.check(operation)
        self._activity = Activity(
            operation + purpose(), self._activity.number + 1, True, monotonic()
        )
        self._recent.append(self._activity)
        if self._failing is not None:
            self._tell_if_past()

    def left(self) -> None:
        """Note that this rank is back from its operation."""
        last = self._activity
        self._activity = Activity(last.operation, last.number, False, monotonic())
        self._recent.append(self._activity)

    def check(self, operation: str) -> None:
        """Return unless a rank has failed; cheap enough to poll."""
        verdict = self._verdict
        if verdict is not None:
            self._hear()
            raise RankFailedError(self._message(operation, verdict))

    def explain(self, operation: str, wait_seconds: float = 1.0) -> RankFailedError:
        """Return the error for an operation that the transport says has failed.

        It waits for the verdict, which may be under way.
        """
        if self._verdict is None and not self._hub_has_left:
            self._send({"kind": "ask"})
        with self._news:
            self._news.wait_for(self._is_decided, wait_seconds)
            if self._verdict is not None:
                self._hear()
                return RankFailedError(self._message(operation, self._verdict))
            if self._hub_has_left:
                self._table.setdefault(0, "has left in order")
            self._write_stacks(f"{operation} was not finished in time")
            message = late_message(self.rank, self.world_size, operation, self._table)
            return RankFailedError(message + self._where)

    def _message(self, operation: str, verdict: LivenessVerdict) -> str:
        return failure_message(self.rank, self.world_size, operation, verdict) + self._where

    @property
    def _where(self) -> str:
        """The sentence that names the file with the stacks; "" where there is none."""
        return f" Where rank {self.rank} was stands in {self._stacks}." if self._stacks else ""

    def _write_stacks(self, reason: str) -> None:
        if not self._stacks:
            place = self.rank, self.world_size
            self._stacks = write_stacks(*place, reason, list(self._recent), monotonic())

    def fail(self, error: BaseException, place: Any) -> bool:
        """Tell that this rank has raised, and return whether all have at the same place.

        Then their groups work still; if not, all are told of the first, as by `announce_failure`.
        The place is JSON that all ranks build alike, so that it compares.
        """
        with self._news:
            if self._verdict is not None or self._hub_has_left:
                return self._all_raised
        self.beat()
        number = self._activity.number
        self._send({"kind": "raised", "event": _describe(error), "place": place, "number": number})
        with self._news:
            self._news.wait_for(
                lambda: self._all_raised or self._is_decided(), self._silence_seconds
            )
        if not self._all_raised:
            self.announce_failure(error)
        return self._all_raised

    def _hear(self) -> None:
        """Note that the main thread ends by itself; other threads hear of a verdict for theirs."""
        if threading.current_thread() is self._main:
            self._ends_at = math.inf

    def announce_failure(self, error: BaseException) -> None:
        """Tell all ranks that this one fails, with this error; does nothing after a verdict."""
        text = _describe(error)
        self._hear()
        with self._news:
            if self._verdict is not None or self.stops or self._all_raised:
                return
            doing = f"it was {self._activity.describe(monotonic())}"
            self._verdict = LivenessVerdict(rank=self.rank, event=text, doing=doing)
        self.beat()
        self._send({"kind": "failed", "event": text})

    def announce_termination(self) -> None:
        """Tell all ranks that this one has been sent SIGTERM, so that they stop together."""
        if not self.was_terminated:
            self.was_terminated = True
            self._send({"kind": "terminating"})

    def announce_requeue(self) -> None:
        """Tell all ranks that SLURM will start the job again, so that they stop together."""
        if not self._has_announced_requeue:
            self._has_announced_requeue = True
            self._send({"kind": "terminating", "requeues": True})

    def _is_decided(self) -> bool:
        return self.has_verdict or self._hub_has_left

    @property
    def has_verdict(self) -> bool:
        """Whether a rank is known to have failed, so that this one is ending."""
        return self._verdict is not None

    @property
    def is_ending(self) -> bool:
        """Whether this rank ends: one has failed, or all have come to where they stop."""
        return self.has_verdict or self.stops

    @property
    def dead_rank(self) -> int | None:
        """The rank that the verdict says is gone for good; None for one that has raised."""
        verdict = self._verdict
        if verdict is None or not verdict.event.startswith(("died", "fell silent")):
            return None
        return verdict.rank

    @property
    def stops(self) -> bool:
        """Whether this rank has come to the step before which all ranks stop."""
        return self._stop_step is not None and self._steps >= self._stop_step

    def step(self) -> bool:
        """Begin a step of the run, as every rank does; return whether all stop before it."""
        with self._news:
            self._steps += 1
            if self.terminated_rank is not None:
                self._news.wait_for(lambda: self._stop_step is not None or self._is_decided())
        self.check("the next step")
        if self.stops:
            self._send({"kind": "stopped"})
        return self.stops or (self._hub_has_left and self.was_terminated)

    def leave(self) -> None:
        """Say goodbye to the others; rank 0 waits until the hub has told them."""
        self._send({"kind": "bye"})
        if self.rank == 0:
            with self._news:
                self._news.wait_for(lambda: self._hub_has_left, _LEAVING_SECONDS)

    # --- told by the lifeline's thread ----------------------------------------------------------

    @property
    def longest_beat_seconds(self) -> float:
        """How many seconds lie between two beats: few until the hub knows that this rank runs."""
        return _LONGEST_BEAT_SECONDS if self.has_told_of_operations else _FIRST_BEAT_SECONDS

    def beat(self) -> None:
        """Tell the hub what this rank is doing."""
        activity = self._activity
        self.has_told_of_operations = self.has_told_of_operations or activity.number > 0
        now = monotonic()
        seconds = now - activity.since
        is_long = activity.number and seconds > _LONG_SECONDS
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        place = f" at {find_call_site(main)}" if is_long else ""
        waits = seconds if activity.inside else 0.0
        self._send({"kind": "beat", "doing": activity.describe(now) + place, "waits": waits})

    def tick(self, now: float) -> None:
        """Beat, and end a process whose main thread does not hear of a verdict: it computes."""
        self.beat()
        if now > self._ends_at:
            self._print("has not heard of it, and is ended")
            os._exit(1)

    def heard(self, message: Message, now: float) -> None:
        """Take note of a message that has come from the hub."""
        match message["kind"]:
            case "welcome":
                self._all_have_come = True
            case "verdict":
                self._judge(
                    LivenessVerdict(**{key: message[key] for key in ("rank", "event", "doing")})
                )
            case "table":
                self._table = {int(rank): doing for rank, doing in message["table"].items()}
            case "waiting":
                self._print("; ".join(message["ranks"]))
            case "hold":
                with self._news:
                    self.terminated_rank = message["rank"]
                    steps = self._steps
                self._send({"kind": "hold", "steps": steps})
                received = "SLURM's requeue signal" if "requeues" in message else "SIGTERM"
                self._print(
                    f"rank {message['rank']} received {received}; all stop at the next step"
                )
            case "stop":
                self.requeues = "requeues" in message
                self._stop_step = message["step"]
            case "raised":
                self._failing = message["number"]
                self._tell_if_past()
            case "common":
                self._all_raised = True
            case "bye":
                self._hub_has_left = True
        with self._news:
            self._news.notify_all()

    def server_lost(self, event: str) -> None:
        """Take note that the hub, which is rank 0's, "died" or "fell silent for ..."."""
        if not self._hub_has_left:
            doing = "it held the ranks' connections, so nothing is known of the others"
            self._judge(LivenessVerdict(rank=0, event=event, doing=doing))

    def lost(self, rank: int, event: str) -> None:
        """Take note of a rank's end that the job's rendezvous server has reported."""
        self._judge(
            LivenessVerdict(rank=rank, event=event, doing="the job's rendezvous server says so")
        )

    def _tell_if_past(self) -> None:
        """Tell the hub if this rank waits in an operation that the failing one never comes to."""
        activity = self._activity
        if self._failing is not None and activity.inside and activity.number > self._failing:
            self._send({"kind": "past"})

    def _judge(self, verdict: LivenessVerdict) -> None:
        if self._verdict is None and verdict.is_timeout:  # before a thread goes on with it
            self._write_stacks(str(verdict))
        with self._news:
            is_first, self._verdict = self._verdict is None, self._verdict or verdict
            self._news.notify_all()
        if is_first and not self._meets_anew:
            is_late = verdict.event.startswith(NO_STEP)
            seconds = _ENDING_SECONDS if is_late else settings.grace_seconds()
            self._ends_at = monotonic() + seconds
        if is_first:
            # At once: a launcher may end this process before its main thread can raise.
            self._print(f"{verdict}.{self._where}" if self._stacks else str(verdict))
            self._interrupt()

    def _print(self, news: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            print(f"[rank {self.rank}] {news}", file=sys.stderr, flush=True)


def _describe(error: BaseException) -> str:
    text = ": ".join(filter(None, (f"raised {type(error).__name__}", str(error))))
    return text[:_LONGEST_EVENT]
