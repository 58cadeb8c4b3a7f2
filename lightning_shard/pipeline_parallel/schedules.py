"""Schedules: the computations, sends and receives of each rank of a pipeline, in order.

A schedule is a table of actions, one row per rank. GPipe with 2 stages and 2 microbatches:

    rank 0   0F0 0SEND_F0  0F1 0SEND_F1  0RECV_B1  0RECV_B0  0B1  0B0
    rank 1   1RECV_F0  1RECV_F1  1F0  1F1  1B1 1SEND_B1  1B0 1SEND_B0

Stages lie on the ranks in a loop (stage s on rank s mod p) or in a V (there and back):

    loop   rank 0: 0 4   1: 1 5   2: 2 6   3: 3 7
    V      rank 0: 0 7   1: 1 6   2: 2 5   3: 3 4        3 to 4 and the loss need no message

The two schedules of one stage per rank are written here; the others come from torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, cast

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel._torch import Step, add_messages, computations

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dual_pipe_v",
)
_ONE_STAGE = ("gpipe", "1f1b")
_V_SHAPED = ("zbv", "dual_pipe_v")
_IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
FORWARD_ONLY = "forward_only"


StageInput = tuple[int, str, int]  # the stage that takes it, "F" or "B", the microbatch


class Action(NamedTuple):
    """One step of a rank on one of its stages; `str` gives it as torch prints it: 0F1, 1SEND_B0.

    Kinds: F forward, B full backward, or its halves I (gradients of the inputs) and W (of the
    weights); SEND_F and RECV_F move activations up, SEND_B and RECV_B gradients down.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """Whether the rank computes, rather than sends or receives."""
        return self.kind in ("F", "B", "I", "W")

    @property
    def output(self) -> "StageInput":
        """The input of a neighbouring stage that a forward or backward, or its SEND, makes."""
        if self.kind in ("F", "SEND_F"):
            return self.stage + 1, "F", self.microbatch
        return self.stage - 1, "B", self.microbatch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The table of one training step, or of a forward pass alone.

    Attributes:
        name: Name of the schedule, one of `SCHEDULES`, or "forward_only".
        stage_ranks: Group rank of each stage.
        actions: Actions of each rank, in order, with sends and receives.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline, over all ranks."""
        return len(self.stage_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on this rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> Schedule:
    """Make the table of a training step.

    Args:
        name: Name of the schedule, one of `SCHEDULES`.
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Number of microbatches of the batch.
        num_stages: Number of stages over all ranks; by default one per rank for gpipe and 1f1b,
            else two.

    Raises:
        ConfigError: The schedule does not exist, or does not allow these numbers.

    Source:
        gpipe arXiv:1811.06965, 1f1b arXiv:2006.09503, interleaved_1f1b arXiv:2104.04473,
        looped_bfs arXiv:2211.05953 (but the newest backward first), interleaved_zero_bubble (ZB-H1)
        and zbv arXiv:2401.10241, dual_pipe_v https://github.com/deepseek-ai/DualPipe.
    """
    num_stages = checked_stages(name, num_ranks, num_microbatches, num_stages)
    stage_ranks = place_stages(name, num_ranks, num_stages)
    if name in _ONE_STAGE:
        tables = [_row(name, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    else:
        tables = computations(name, num_ranks, num_stages, num_microbatches)
    return _with_messages(name, num_microbatches, stage_ranks, tables)


def forward_schedule(training: Schedule | Sequence[int], num_microbatches: int) -> Schedule:
    """Make the table of a forward pass alone: each rank runs all microbatches stage by stage."""
    ranks = tuple(training.stage_ranks if isinstance(training, Schedule) else training)
    tables: list[list[Step | None]] = [[None] * rank for rank in range(max(ranks) + 1)]
    for stage, rank in enumerate(ranks):
        tables[rank] += [(stage, "F", microbatch) for microbatch in range(num_microbatches)]
    return _with_messages(FORWARD_ONLY, num_microbatches, ranks, tables)


def with_full_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule that does both halves of each backward where the first one stands."""

    def joined(action: Action) -> Action:
        return action._replace(kind="B") if action.kind == "I" else action

    rows = (
        tuple(joined(action) for action in row if action.kind != "W") for row in schedule.actions
    )
    return replace(schedule, actions=tuple(rows))


def default_stages_per_rank(name: str) -> int:
    """Return the number of stages that a rank has by default."""
    return 1 if name in _ONE_STAGE else 2


def place_stages(name: str, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage: in a V for zbv and dual_pipe_v, else in a loop."""
    if name in _V_SHAPED:
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(stage % num_ranks for stage in range(num_stages))


def allowed_microbatches(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether a schedule allows this number of microbatches over this many ranks."""
    if num_microbatches < 1:
        return False
    if name in _IN_ROUNDS:
        rounds = max(1, num_microbatches // num_ranks)
        return num_microbatches % rounds == 0
    return name != "dual_pipe_v" or num_microbatches >= 2 * num_ranks


def checked_stages(
    name: str, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> int:
    """Return the number of stages over all ranks, or refuse numbers that do not go together."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; expected one of {', '.join(SCHEDULES)}.")
    if num_ranks < 1:
        raise ConfigError(f"A pipeline over {num_ranks} ranks; expected at least 1.")
    if num_stages is None:
        num_stages = num_ranks * default_stages_per_rank(name)
    _check_stages(name, num_ranks, num_stages)
    if not allowed_microbatches(name, num_ranks, num_microbatches):
        near = _nearest_microbatches(name, num_ranks, num_microbatches)
        raise ConfigError(
            f"num_microbatches is {num_microbatches} with schedule={name!r} over {num_ranks} "
            f"ranks; expected {_demand(name, num_ranks)}. Set num_microbatches to "
            f"{' or '.join(map(str, near))}, or choose another schedule."
        )
    return num_stages


def _check_stages(name: str, num_ranks: int, num_stages: int) -> None:
    per_rank, rest = divmod(num_stages, num_ranks)
    if name in _ONE_STAGE or name in _V_SHAPED:
        wanted = default_stages_per_rank(name)
        if num_stages != wanted * num_ranks:
            raise ConfigError(
                f"{num_stages} stages over {num_ranks} ranks with schedule={name!r}; expected "
                f"{wanted} per rank. Set the stages to {wanted * num_ranks}, or choose another "
                "schedule: interleaved_1f1b and looped_bfs take any number per rank."
            )
    elif per_rank < 1 or rest:
        fit = sorted({max(1, per_rank) * num_ranks, (per_rank + 1) * num_ranks})
        raise ConfigError(
            f"{num_stages} stages over {num_ranks} ranks with schedule={name!r}; expected the "
            f"same number on every rank. Set the stages to {' or '.join(map(str, fit))}."
        )


def _demand(name: str, num_ranks: int) -> str:
    if name == "dual_pipe_v":
        return f"at least one per stage, {2 * num_ranks}"
    if name in _IN_ROUNDS:
        return (
            f"at least 1, in equal rounds of at least {num_ranks} (a multiple of {num_ranks} "
            "always fits)"
        )
    return "at least 1"


def _nearest_microbatches(name: str, num_ranks: int, num_microbatches: int) -> list[int]:
    """Return the nearest allowed number below, if there is one, and the nearest above."""
    below = range(num_microbatches - 1, 0, -1)
    above = range(max(1, num_microbatches + 1), max(1, num_microbatches) + 2 * num_ranks + 1)
    nearest = [
        next((m for m in numbers if allowed_microbatches(name, num_ranks, m)), None)
        for numbers in (below, above)
    ]
    return [m for m in nearest if m is not None]


def _row(name: str, rank: int, num_ranks: int, num_microbatches: int) -> list[Step | None]:
    """Return a rank's row.

    GPipe: all forwards, then all backwards, the newest first. 1F1B: a forward for each later stage,
    then forwards and backwards.
    """
    forwards: list[Step | None] = [(rank, "F", i) for i in range(num_microbatches)]
    hops = num_ranks - 1 - rank
    if name == "gpipe":
        backwards = [(rank, "B", i) for i in reversed(range(num_microbatches))]
        # 2 slots a hop would do; with 3 a gradient is received while one before is computed with.
        return [*_idle(rank), *forwards, *_idle(3 * hops), *backwards]
    warmup = forwards[:hops]
    steady = forwards[hops:] + _idle(len(warmup))
    pairs = chain.from_iterable((f, (rank, "B", i)) for i, f in enumerate(steady))
    return [*_idle(rank), *warmup, *_idle(2 * hops - len(warmup)), *pairs]


def _idle(slots: int) -> list[Step | None]:
    """Return empty slots, which only decide where receives are put between the rows."""
    return [None] * slots


def _with_messages(
    name: str, num_microbatches: int, stage_ranks: tuple[int, ...], tables: list[list[Step | None]]
) -> Schedule:
    return Schedule(
        name=name,
        num_ranks=len(tables),
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(
            tuple(Action(stage, cast(Kind, kind), i) for stage, kind, i in row)
            for row in add_messages(tables, stage_ranks)
        ),
    )


_AHEAD = 2  # computations: the one that the peer works at now, and its answer


def with_early_receives(schedule: Schedule) -> Schedule:
    """Return a schedule that does the same, and posts each receive two computations earlier.

        as published    0B0  0F2 0SEND_F2  0RECV_B1  0B1
        early           0RECV_B1  0B0  0F2 0SEND_F2  0B1

    A message whose receive is not posted stays with its sender. Only for backends that match
    messages by their tags: where they go in the order of posting, as with NCCL, a receive that
    stands before a send that its peer waits for is a deadlock.
    """
    return replace(schedule, actions=tuple(map(_early, schedule.actions)))


def _early(row: tuple[Action, ...]) -> tuple[Action, ...]:
    moved: list[Action] = []
    for action in row:
        place = len(moved)
        if action.kind.startswith("RECV"):
            place = _place(moved, action)
        moved.insert(place, action)
    return tuple(moved)


def _place(before: list[Action], receive: Action) -> int:
    """Return the earliest index in the actions before a receive at which it can stand."""
    place, passed = len(before), 0
    while place and passed < _AHEAD and not _must_precede(before[place - 1], receive):
        place -= 1
        passed += before[place].computes
    return place


def _must_precede(action: Action, receive: Action) -> bool:
    """Whether an action has to stay before a receive: receives keep their order."""
    answers = receive.kind == "RECV_B" and (action.stage, action.microbatch) == (
        receive.stage,
        receive.microbatch,
    )
    return answers or action.kind.startswith("RECV")
