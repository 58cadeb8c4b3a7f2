"""What a candidate holds, sends and waits: closed forms over a model's anatomy.

    memory    weights by ZeRO stage  +  stage-microbatches in flight x saved  +  what passes
    traffic   gradients and parameters on dp, regions on tp, boundaries on pp     (rings)
    time      the schedule with the stages' durations  +  what dp does not hide  +  optimizer

Memory is that of the dry run of the same options but for padding; traffic of a pipeline under ZeRO
stage 3, which gathers as its actions follow each other, is an upper bound. Times are those of
arithmetic and memory at the profile's peaks, one after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from lightning_shard.core.mesh import Axis
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.pipeline_parallel.partition import best_bounds
from lightning_shard.pipeline_parallel.schedules import Action, Schedule, make_schedule
from lightning_shard.pipeline_parallel.simulation import replay
from lightning_shard.planning.anatomy import Anatomy, Weights, tied_bytes
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.machine import MachineProfile
from lightning_shard.planning.report import ActivationBytes, RankMemory

_UNIT_BYTES = 12.5 * 2**20  # up to which stage 3 joins small blocks
_SUMS_OF_BLOCK = 4  # over ranks that share its layers: attention and MLP, forward and backward
_UPDATE_VALUES = 3  # that are read and written beside state: the weight twice, and its gradient


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A candidate's figures, of its fullest or busiest rank.

    Attributes:
        rank: The fullest rank of the pipeline.
        memory: Bytes of that rank by kind.
        passing: Further bytes that live for a moment within forward and backward, at most.
        sent: Bytes that the rank that sends most sends along each axis in a step.
        seconds: Duration of a step; a lower bound with published profiles.
        hidden_share: Share of data-parallel traffic that computing hides, 0 to 1.
        is_simulated: Whether memory that stays and traffic are those of a dry run; times, the idle
            share and, in a pipeline, what passes are estimates all the same.
    """

    candidate: PlanCandidate
    rank: int
    memory: RankMemory
    passing: int
    sent: Mapping[Axis, int]
    idle_share: float
    seconds: float
    hidden_share: float
    is_simulated: bool = False
    sent_elements: Mapping[Axis, int] | None = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the fullest rank has on its device."""
        return self.memory.total - self.memory.recomputed + self.passing


class Estimator:
    """Estimates candidates for one module on one kind of machine."""

    def __init__(self, anatomy: Anatomy, machine: MachineProfile, ranks_per_node: int) -> None:
        self.anatomy, self.machine, self.ranks_per_node = anatomy, machine, ranks_per_node

    def estimate(self, one: PlanCandidate) -> Estimate:
        """Return a candidate's figures."""
        return _PipelinedEstimate(self, one).made() if one.pp > 1 else self._unpipelined(one)

    def _unpipelined(self, one: PlanCandidate) -> Estimate:
        parts = self.anatomy.unpipelined(one.tp, one.checkpointing)
        blocks, size = self.anatomy.num_blocks, one.microbatch
        weights = self.weights_of(one.tp, (0, blocks), blocks)
        stage = self.anatomy.keeps_as(one.checkpointing, one.zero_stage)
        kept = self.anatomy.unpipelined(one.tp, one.checkpointing, stage)
        saved = int(kept.saved.at(size, blocks))
        memory = self.memory(one, weights, activations(one, saved), 0, in_pipeline=False)
        flops = self.flops(one, (0, blocks))
        sent_tp = parts.sent.at(size, blocks)
        compute = flops / self.machine.flops(self.anatomy.precision)
        compute += parts.moved.at(size, blocks) / self.machine.memory_bytes_per_second
        compute += sent_tp / self.machine.bytes_per_second(
            inside_node=one.tp <= self.ranks_per_node
        )
        compute += self.waits_of_layers(one, blocks)
        if one.activation_offload:  # copies go beside what computes
            compute = max(compute, 2 * saved / self.machine.host_bytes_per_second)
        seconds, sent_dp, hidden = self.with_data_parallel(one, weights, compute)
        return Estimate(
            candidate=one,
            rank=0,
            memory=memory,
            passing=self.passing(one),
            sent={"pp": 0, "dp": int(sent_dp), "tp": int(sent_tp * one.num_microbatches)},
            idle_share=0.0,
            seconds=seconds,
            hidden_share=hidden,
        )

    def waits_of_layers(self, one: PlanCandidate, blocks: int) -> float:
        """Return the seconds of a microbatch until the first bytes of the layers' sums arrive."""
        steps = _SUMS_OF_BLOCK * blocks * 2 * (one.tp - 1)  # of a ring
        return steps * self.machine.message_seconds

    def passing(self, one: PlanCandidate) -> int:
        """Return the bytes beside what is saved, scaled from a few samples where they are more."""
        parts, size = self.anatomy.unpipelined(one.tp, one.checkpointing), one.microbatch
        sizes = self.anatomy.sizes
        some = max(parts.most.at(at, 2) - parts.saved.at(at, 2) for at in sizes if at <= size)
        return int(some * max(1.0, size / sizes[1]))

    def weights_of(self, tp: int, bounds: tuple[int, int], blocks: int) -> Weights:
        """Return the parameters of a rank that has a range of the blocks."""
        parts = self.anatomy.weights(tp)
        found = parts["block"] * (bounds[1] - bounds[0])
        is_first, is_last = bounds[0] == 0, bounds[1] == blocks
        if is_first:
            found += parts["before"]
        if is_last:
            found += parts["after"]
        return found + parts["both"] if is_first or is_last else found

    def flops(self, one: PlanCandidate, bounds: tuple[int, int]) -> float:
        """Return the operations of forward and backward of a microbatch on one rank."""
        costs, blocks = self.anatomy.flops, self.anatomy.num_blocks
        inner = (bounds[1] - bounds[0]) * sum(costs.blocks)
        outer = (costs.before if bounds[0] == 0 else 0) + (
            costs.after if bounds[1] == blocks else 0
        )
        again = 4 if one.checkpointing == "full" else 3
        return (again * inner + 3 * outer) * one.microbatch / one.tp

    def memory(
        self,
        one: PlanCandidate,
        weights: Weights,
        saved: ActivationBytes,
        recomputed: int,
        *,
        in_pipeline: bool,
    ) -> RankMemory:
        """Return the bytes of a rank by kind."""
        stage, dp = one.zero_stage, one.dp
        share = dp if stage else 1
        parameters = weights.own
        gathered = 0
        if stage == 3:
            parameters, gathered = weights.own // dp, self._gathered(one.tp, weights)
        gradients = weights.trained // (dp if stage >= 2 else 1)
        state = int(self.anatomy.state_values * weights.trained) // share
        offloaded = 0
        if one.offload is not None:
            offloaded = (weights.own + weights.trained) // dp + state
            parameters = 0 if stage == 3 else weights.own
            gradients, state = (gradients if stage < 2 else 0), 0
        return RankMemory(
            parameters=parameters,
            gathered=gathered,
            gradients=gradients,
            gradients_in_flight=self._in_flight(weights) if in_pipeline else 0,
            optimizer_state=state,
            activations=saved.on_device,
            recomputed=recomputed,
            offloaded=offloaded + saved.on_host,
        )

    def _in_flight(self, weights: Weights) -> int:
        is_half = self.anatomy.precision in ("bf16-true", "16-true")
        return weights.trained * 2 if is_half else weights.trained  # at least float32

    def _gathered(self, tp: int, weights: Weights) -> int:
        block, blocks = self.anatomy.weights(tp)["block"].used, self.anatomy.num_blocks
        root = sum(part.used for name, part in self.anatomy.weights(tp).items() if name != "block")
        per_unit = max(1, int(_UNIT_BYTES // max(block, 1)))
        return min(weights.used, root + 2 * per_unit * block, root + blocks * block)

    def with_data_parallel(
        self, one: PlanCandidate, weights: Weights, compute: float
    ) -> tuple[float, float, float]:
        """Return a step's seconds, the bytes sent on dp, and the share of those that is hidden.

        `compute` has the seconds of one microbatch, or of the whole schedule of a pipeline.
        """
        machine, dp, stage = self.machine, one.dp, one.zero_stage
        ring, parts = (dp - 1) / dp, one.accumulated
        speed = machine.bytes_per_second(inside_node=dp * one.tp <= self.ranks_per_node)
        reduced = weights.trained * ring * (2 if stage == 0 else 1)
        per_part = reduced if stage >= 2 else 0.0
        if stage == 3:
            per_part += self._gathers(one, weights) * ring
        at_end = (reduced if stage < 2 else 0.0) + (
            weights.trained * ring if stage in (1, 2) else 0.0
        )
        backward = compute * 2 / 3 / (one.num_microbatches if one.pp > 1 else 1)
        wait = self._units(one, weights) * (dp - 1) * machine.message_seconds  # one for all units
        waits = {0: 0, 1: 0, 2: 1, 3: 3 * (one.num_microbatches if one.pp > 1 else 1)}[stage]
        travels = per_part / speed + waits * wait
        shown = parts * max(0.0, travels - (compute if stage == 3 else backward))
        if stage < 2:
            shown += max(0.0, reduced / speed + (2 - stage) * wait - backward)
        shown += weights.trained * ring / speed + wait if stage in (1, 2) else 0.0
        sent = parts * per_part + at_end
        values = _UPDATE_VALUES + 2 * self.anatomy.state_values
        update = values * weights.trained / (dp if stage else 1)
        seconds = parts * compute + shown + update / machine.memory_bytes_per_second
        if one.offload is not None:
            seconds += 2 * weights.trained / dp / machine.host_bytes_per_second
        hidden = 1 - shown * speed / sent if sent else 1.0
        return seconds, sent, min(1.0, max(0.0, hidden))

    def _units(self, one: PlanCandidate, weights: Weights) -> int:
        """Return how many buffers a rank's parameters are communicated as."""
        largest = _UNIT_BYTES if one.zero_stage == 3 else 2 * _UNIT_BYTES
        block = max(1, self.anatomy.weights(one.tp)["block"].used)
        return max(1, min(weights.used // block, int(weights.used // largest))) if one.dp > 1 else 0

    def _gathers(self, one: PlanCandidate, weights: Weights) -> float:
        """Return the bytes that stage 3 gathers: blocks in forward and backward, the rest once."""
        blocks = weights.used - self._root(one, weights)
        times = one.num_microbatches if one.pp > 1 else 1
        return self._root(one, weights) + 2 * blocks * times

    def _root(self, one: PlanCandidate, weights: Weights) -> int:
        """Return the bytes of a rank's parameters outside of blocks."""
        parts = self.anatomy.weights(one.tp)
        if one.pp == 1:
            return weights.used - parts["block"].used * self.anatomy.num_blocks
        ends = [(parts[end] + parts["both"]).used for end in ("before", "after")]
        block = parts["block"].used
        return next((end for end in ends if (weights.used - end) % block == 0), 0)


def activations(one: PlanCandidate, saved: int, staying: int = 0) -> ActivationBytes:
    """Return where so many bytes of activations lie, some of which stay on the device anyway."""
    if not one.activation_offload:
        return ActivationBytes(saved)
    moving = max(0, saved - staying)
    return ActivationBytes(
        saved - moving + min(moving, HostActivations.in_flight_bytes), on_host=moving
    )


class _PipelinedEstimate:
    """The figures of one candidate with a pipeline."""

    def __init__(self, estimator: Estimator, one: PlanCandidate) -> None:
        self.of, self.one = estimator, one
        self.anatomy, self.machine = estimator.anatomy, estimator.machine
        stage = self.anatomy.keeps_as(one.checkpointing, one.zero_stage)
        self.stages = self.anatomy.stages(one.tp, one.checkpointing, stage)
        self.num_stages = one.pp * one.stages_per_rank
        parts = self.anatomy.weights(one.tp)
        numels = tuple(parts[name].numel for name in ("before", "block", "after", "both"))
        self.bounds = _bounds(numels, self.anatomy.num_blocks, self.num_stages)
        count = min(one.num_microbatches, 4 * one.pp)  # beyond a few rounds all are alike
        self.table = _table(one.schedule, one.pp, count, self.num_stages)
        self.left_out = one.num_microbatches - count

    def made(self) -> Estimate:
        one, blocks = self.one, self.anatomy.num_blocks
        durations = [self._durations(stage) for stage in range(self.num_stages)]
        seconds, idle = self._step(durations)
        ranks = [self.table.stages_of(rank) for rank in range(one.pp)]
        weights = [
            sum((self.of.weights_of(one.tp, self._range(s), blocks) for s in own), Weights())
            for own in ranks
        ]
        memories = [
            self.of.memory(one, held, self._kept(rank), self._recomputed(), in_pipeline=True)
            for rank, held in enumerate(weights)
        ]
        passing = [self._passing(own) for own in ranks]
        fullest = max(range(one.pp), key=lambda rank: memories[rank].total + passing[rank])
        heaviest = max(weights, key=lambda held: held.used)
        total, sent_dp, hidden = self.of.with_data_parallel(one, heaviest, seconds)
        return Estimate(
            candidate=one,
            rank=fullest,
            memory=memories[fullest],
            passing=passing[fullest],
            sent={
                "pp": max(self._sent_pp(own) for own in ranks),
                "dp": int(sent_dp),
                "tp": int(
                    max(sum(map(self._tp_bytes, own)) for own in ranks)
                    * one.num_microbatches
                    * one.rounds
                ),
            },
            idle_share=idle,
            seconds=total,
            hidden_share=hidden,
        )

    def _range(self, stage: int) -> tuple[int, int]:
        return self.bounds[stage], self.bounds[stage + 1]

    def _place(self, stage: int) -> str:
        return "first" if stage == 0 else "last" if stage == self.num_stages - 1 else "middle"

    def _num_blocks(self, stage: int) -> int:
        return self.bounds[stage + 1] - self.bounds[stage]

    def _saved(self, stage: int) -> float:
        figure = self.stages.saved[self._place(stage)]
        return figure.at(self.one.microbatch, self._num_blocks(stage))

    def _recomputed(self) -> int:
        return int(self.stages.recomputed.at(self.one.microbatch, 1))

    def _passing(self, own: tuple[int, ...]) -> int:
        """The head's passing bytes on the last stage, what is computed again elsewhere."""
        return self.of.passing(self.one) if self.num_stages - 1 in own else self._recomputed()

    def _kept(self, rank: int) -> ActivationBytes:
        size = self.one.microbatch  # what a stage receives and sends stays on the device
        staying = self._peak(rank, lambda stage: sum(self._messages(stage, size)))
        return activations(self.one, self._peak(rank, self._saved), staying)

    def _peak(self, rank: int, figure: Callable[[int], float]) -> int:
        def change(action: Action) -> float:
            held = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            return held * figure(action.stage) if held else 0.0

        return int(max(accumulate(map(change, self.table.actions[rank])), default=0))

    def _messages(self, stage: int, size: float) -> tuple[float, float]:
        forward = self.stages.forward_message.at(size, 1) if stage < self.num_stages - 1 else 0.0
        backward = self.stages.backward_message.at(size, 1) if stage > 0 else 0.0
        return forward, backward

    def _sent_pp(self, own: tuple[int, ...]) -> int:
        per = sum(sum(self._messages(stage, self.one.microbatch)) for stage in own)
        ends = 0 in own or self.num_stages - 1 in own
        ties = tied_bytes(self.anatomy.weights(self.one.tp)) if ends else 0
        return int(per * self.one.num_microbatches * self.one.rounds + ties)

    def _tp_bytes(self, stage: int) -> float:
        figure = self.stages.sent_tp[self._place(stage)]
        return figure.at(self.one.microbatch, self._num_blocks(stage))

    def _durations(self, stage: int) -> tuple[float, float]:
        """Return the seconds of a stage's forward and backward of one microbatch."""
        one, machine, node = self.one, self.machine, self.of.ranks_per_node
        moved = self.anatomy.unpipelined(one.tp, one.checkpointing).moved
        none = moved.at(one.microbatch, 0) if stage == self.num_stages - 1 else 0.0
        per_block = moved.at(one.microbatch, 1) - moved.at(one.microbatch, 0)
        work = self.of.flops(one, self._range(stage)) / machine.flops(self.anatomy.precision)
        work += (none + per_block * self._num_blocks(stage)) / machine.memory_bytes_per_second
        tp_speed = machine.bytes_per_second(inside_node=one.tp <= node)
        work += self._tp_bytes(stage) / tp_speed
        work += self.of.waits_of_layers(one, self._num_blocks(stage))
        if one.activation_offload:
            work = max(work, 2 * self._saved(stage) / machine.host_bytes_per_second)
        share = 1 / 4 if one.checkpointing == "full" else 1 / 3
        speed = machine.bytes_per_second(inside_node=one.pp * one.dp * one.tp <= node)
        forward, backward = (
            message / speed + machine.message_seconds
            for message in self._messages(stage, one.microbatch)
        )
        return work * share + forward, work * (1 - share) + backward

    def _step(self, durations: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the seconds of all microbatches and the mean idle share of the ranks."""
        of_action = {
            action: durations[action.stage]["FB".index(action.kind)]
            for row in self.table.actions
            for action in row
            if action.kind in ("F", "B")
        }
        timeline = replay(self.table, of_action)
        loads = [
            sum(sum(durations[stage]) for stage in self.table.stages_of(rank))
            for rank in range(self.one.pp)
        ]
        short = max(event.end for row in timeline.rows for event in row)
        total = short + self.left_out * max(loads)
        busy = sum(loads) * self.one.num_microbatches / self.one.pp
        return total, 1 - busy / total


@lru_cache(maxsize=256)
def _table(name: str, num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    return make_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_stages=num_stages
    )


@lru_cache(maxsize=256)
def _bounds(numels: tuple[int, ...], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    before, block, after, both = numels

    def cost(start: int, stop: int) -> float:
        first, last = start == 0, stop == num_blocks
        ends = first * before + last * after + (first or last) * both
        return block * (stop - start) + ends

    return best_bounds(cost, num_blocks, num_stages)
