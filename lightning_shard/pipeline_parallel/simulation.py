"""A replay of a schedule with given durations: which ranks wait, and for how long.

    rank 0   F0 ─┬─ F1 ...
                 └ message ┐
    rank 1                 F0 ...

Each rank does its actions in order; a computation waits for its input. The model knows latency, not
bandwidth. The replay also proves that a table fits together: ranks that wait for a message that
never comes are listed in a `DeadlockError`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_shard.errors import DeadlockError
from lightning_shard.pipeline_parallel.schedules import (
    Action,
    Schedule,
    StageInput,
    checked_stages,
)
from lightning_shard.pipeline_parallel.timeline import Event, Timeline

_KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True, kw_only=True)
class Durations:
    """The duration of each kind of action, in any one unit."""

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0

    def __getitem__(self, action: Action) -> float:
        """Return the duration of a computation."""
        duration: float = getattr(self, _KINDS[action.kind])
        return duration


def replay(
    schedule: Schedule, durations: Durations | Mapping[Action, float] | None = None
) -> Timeline:
    """Run a schedule's table on simulated ranks; messages stand in the timeline if they take time.

    Args:
        schedule: The schedule to replay.
        durations: Duration of each kind, by default 1 for F, I and W, 2 for B, and 0 for a message;
            or of each computation, such as `Timeline.durations`, with 0 for a message.
    """
    simulation = _Replay(schedule, Durations() if durations is None else durations)
    simulation.run()
    return Timeline.of_rows(simulation.events)


class _Replay:
    """The state of a replay.

    `sent` holds when a message arrives, from its SEND to its RECV; `ready` when an input is there,
    from its RECV, or from the stage before on the same rank, to the computation.
    """

    def __init__(self, schedule: Schedule, durations: Durations | Mapping[Action, float]) -> None:
        self.schedule = schedule
        self.durations = durations
        self.message = durations.message if isinstance(durations, Durations) else 0.0
        self.stages = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        self.clocks = [0.0] * schedule.num_ranks
        self.positions = [0] * schedule.num_ranks
        self.sent: dict[StageInput, float] = {}
        self.ready: dict[StageInput, float] = {}
        self.waiting: dict[StageInput, int] = {}
        self.runnable = deque(range(schedule.num_ranks))

    def run(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            row = self.schedule.actions[rank]
            while self.positions[rank] < len(row) and self._do(rank, row[self.positions[rank]]):
                self.positions[rank] += 1
        self._check_all_done()

    def _do(self, rank: int, action: Action) -> bool:
        """Do one action; return False when the rank has to wait for its message."""
        if action.computes:
            return self._compute(rank, action)
        if action.kind.startswith("SEND"):
            self._send(rank, action)
            return True
        return self._receive(rank, action)

    def _send(self, rank: int, action: Action) -> None:
        message = action.output
        self.sent[message] = self.clocks[rank] + self.message
        self._record_message(rank, action, self.sent[message])
        if message in self.waiting:
            self.runnable.append(self.waiting.pop(message))

    def _receive(self, rank: int, action: Action) -> bool:
        message = (action.stage, action.kind[-1], action.microbatch)
        if message not in self.sent:
            self.waiting[message] = rank
            return False
        self.ready[message] = self.sent.pop(message)
        self._record_message(rank, action, self.ready[message])
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        start = self.clocks[rank]
        needed = self._input_of(action)
        if needed is not None:
            if needed not in self.ready:
                return False
            start = max(start, self.ready.pop(needed))
        end = self.clocks[rank] = start + self.durations[action]
        self.events[rank].append(Event(action, start, end))
        if action.kind != "W" and action.output[0] in self.stages[rank]:
            self.ready[action.output] = end  # without a message
        return True

    def _input_of(self, action: Action) -> StageInput | None:
        """Return the input of a computation from another stage; None for the ends and for W."""
        first_or_last = 0 if action.kind == "F" else self.schedule.num_stages - 1
        if action.kind == "W" or action.stage == first_or_last:
            return None
        return action.stage, "F" if action.kind == "F" else "B", action.microbatch

    def _record_message(self, rank: int, action: Action, arrival: float) -> None:
        if self.message:
            self.events[rank].append(Event(action, arrival - self.message, arrival))

    def _check_all_done(self) -> None:
        rows = enumerate(zip(self.positions, self.schedule.actions, strict=True))
        stuck = [f"rank {rank} at {row[at]}" for rank, (at, row) in rows if at < len(row)]
        if stuck:
            raise DeadlockError(
                f"The schedule {self.schedule.name!r} waits for what is never sent: "
                f"{', '.join(stuck)}; expected every action to find its input. The table was "
                "changed by hand, or its messages are in another order than their sends."
            )


class IdleShare(NamedTuple):
    """A closed form of the idle share."""

    share: float
    exact: bool


def theoretical_idle_share(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    durations: Durations | None = None,
) -> IdleShare:
    """Return the share of a step in which a rank waits, with all stages alike and messages free.

        |<------------- v m (F + B) ------------->|<- waiting ->|

    A rank computes v stages of m microbatches; F, B, I and W are the durations of one stage and
    microbatch, p the number of ranks. In the units of the papers, which divide by the computing:
    GPipe (p - 1) / m, interleaved (p - 1) / (v m).

    | schedule                | waiting                                      | equality        |
    |-------------------------|----------------------------------------------|-----------------|
    | gpipe, 1f1b             | (p - 1) (F + B)                              | always          |
    | interleaved, looped_bfs | (p - 1 + (v - 1) max(0, p - m)) (F + B)      | always          |
    | interleaved_zero_bubble | (p - 1) max(F, I, F + I - W)                 | m >= p          |
    | zbv                     | (p - 1) F, or 2 (2 p - 1 - m) F for small m  | F = I = W       |
    | dual_pipe_v             | (p - 1) F                                    | F = I = W = B/2 |

    Elsewhere the waiting is a lower bound (0 for dual_pipe_v, which has both, when B is not I + W).
    DeepSeek's (p - 1) (F&B + B - 3 W) takes the forward and backward of a pair as one kernel.

    Source:
        gpipe arXiv:1811.06965; 1f1b and interleaved_1f1b arXiv:2104.04473, section 2.2;
        looped_bfs arXiv:2211.05953; interleaved_zero_bubble and zbv arXiv:2401.10241;
        dual_pipe_v https://github.com/deepseek-ai/DualPipe. The terms for fewer microbatches
        than ranks are not in them: the tests find them in the replay.
    """
    num_stages = checked_stages(name, num_ranks, num_microbatches, num_stages)
    durations = durations or Durations()
    stages_per_rank = num_stages // num_ranks
    waiting, exact = _waiting(name, num_ranks, num_microbatches, stages_per_rank, durations)
    computing = stages_per_rank * num_microbatches * _forward_and_backward(name, durations)
    return IdleShare(waiting / (waiting + computing), exact)


def _waiting(name: str, p: int, m: int, v: int, durations: Durations) -> tuple[float, bool]:
    forward, backward_input = durations.forward, durations.backward_input
    backward_weight = durations.backward_weight
    even = forward == backward_input == backward_weight
    if name == "interleaved_zero_bubble":
        hop = max(forward, backward_input, forward + backward_input - backward_weight)
        return (p - 1) * hop, m >= p
    if name == "zbv":
        return max(p - 1, 2 * (2 * p - 1 - m) if even else 0) * forward, even
    if name == "dual_pipe_v":
        full = durations.backward == backward_input + backward_weight
        return (p - 1) * forward * full, even and full
    hops = p - 1 + (v - 1) * max(0, p - m)
    return hops * (forward + durations.backward), True


def _forward_and_backward(name: str, durations: Durations) -> float:
    halves = durations.backward_input + durations.backward_weight
    if name in ("interleaved_zero_bubble", "zbv"):
        return durations.forward + halves
    return durations.forward + durations.backward
