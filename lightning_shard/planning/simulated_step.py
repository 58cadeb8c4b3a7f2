"""A step of simulated ranks without elements: all of a pipeline, or one, traced.

    rank 0   F0 F1 ...                          each rank goes on until it waits for a message
    rank 1         F0 F1 ..  B0                 of another

Microbatches of one size cost the same: one of them is run and counts for all, but under ZeRO stage
3, where the unsharded units depend on the order.

    forward  ▁▂▃▄▅▆  backward  ▆█▅▄▃▂▁
              saved            most

A dry run says what is saved for backward. In a trace what lives for a moment counts, too: the
gradient of the logits is often the largest.
"""

import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.mesh import ALL_AXES, Axis
from lightning_shard.core.modules import random_streams_kept
from lightning_shard.core.placeholders import tensors_given
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.differentiation import asking
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import held, storage_bytes
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.torch_private import TorchDispatchMode, storage_key
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import tensors_in
from lightning_shard.pipeline_parallel.costs import SavedBytes
from lightning_shard.pipeline_parallel.gradients import OfLastStage, sum_dtype
from lightning_shard.pipeline_parallel.messages import RunningBatch
from lightning_shard.pipeline_parallel.microbatches import BatchReader, Microbatch, split_batch
from lightning_shard.pipeline_parallel.needs import StageRandomness
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import Action, Schedule, StageInput
from lightning_shard.pipeline_parallel.simulation import replay
from lightning_shard.pipeline_parallel.skipped_blocks import uncompiled
from lightning_shard.pipeline_parallel.stage_run import StageRun
from lightning_shard.pipeline_parallel.step_edits import StepBuffers
from lightning_shard.planning.description import WorldOptions
from lightning_shard.planning.report import ActivationBytes, Kept, RankMemory, at_once, peak
from lightning_shard.planning.simulated_model import (
    NoElements,
    SimulatedCollectives,
    SimulatedModel,
    WithoutElements,
    loss_of,
)

_FULL_AT_ONCE = 2  # units under ZeRO stage 3: the one in use and the next


class SimulatedRank:
    """Rank `rank` of a pipeline, the first of its tensor-parallel and data-parallel groups.

    Attributes:
        sent: Bytes that this rank has sent along each axis so far; `sent_elements` are elements.
        saved: What the backward of a stage needs of one microbatch, by stage and size.
        recomputed: Further bytes of the checkpointed block whose recomputation holds most.
    """

    def __init__(self, rank: int, model: SimulatedModel) -> None:
        self.rank, self.model, self.options = rank, model, model.options
        mesh, owners = self.options.mesh, self.options.stage_ranks
        self.stages = tuple(stage for stage, owner in enumerate(owners) if owner == rank)
        self._owners = {
            param: tuple(sorted({owners[stage] for stage in stages}))
            for param, stages in model.stages.items()
        }
        self._here = [
            param
            for param, ranks in self._owners.items()
            if rank in ranks and all(one.is_here(param) for one in model.splits)
        ]
        self._trained = [param for param in self._here if param.requires_grad]
        self._pipeline = SimulatedCollectives(rank, mesh.pp)
        here = set(self._here)
        elsewhere = {p: t.shape for p, t in model.parts.items() if p not in here}
        split = _SimulatedSplit(here, elsewhere, model.splits)
        data = _data_groups(self.options)
        self._groups: dict[Axis, Sequence[Collectives]] = {
            **dict.fromkeys(ALL_AXES, ()),
            **{axis: [group] for axis, group in model.groups.items()},
            "pp": [self._pipeline],
            "dp": [*data.all, *(one.data.dp for one in split.fewer_ranks)],
        }
        for param in self._here:
            param.data = model.parts[param]  # which the engine of another rank may have, too
        self.engine = DataParallelEngine(model.module, data, self.options.engine, data, split)
        self.saved: dict[tuple[int, int], Kept] = {}
        self.sent: dict[Axis, int] = dict.fromkeys(self._groups, 0)
        self.sent_elements = dict(self.sent)
        self.recomputed = 0
        self._runs: dict[tuple[int, int], SavedBytes] = {}
        self._gathered = 0

    def params(self, stage: int) -> list[nn.Parameter]:
        """Return the trained parameters of a stage."""
        return [param for param in self._trained if stage in self.model.stages[param]]

    def has(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether this rank has all of some parameters."""
        return all(self.rank in self._owners[param] for param in params)

    def keep(
        self, stage: int, microbatch: Microbatch, saved: SavedBytes, ends: Sequence[Tensor]
    ) -> None:
        """Note what a stage keeps of a microbatch, and what it has received and sends."""
        saved.keep(ends)
        saved.stay(ends)
        self.saved[stage, microbatch.size] = self._kept(saved)
        self._runs[stage, microbatch.index] = saved

    @contextmanager
    def backward(self, stage: int, index: int) -> Iterator[None]:
        """Count what the backward of a microbatch inside computes again."""
        saved = self._runs.pop((stage, index))
        with saved.backward():
            yield
        self.recomputed = max(self.recomputed, saved.recomputed)

    def train_full(self, microbatch: Microbatch) -> None:
        """Run a step of a model that is in no pipeline, and hand its gradients to the engine."""
        with self.counted(microbatch) as saved:
            loss = loss_of(self.model.step(microbatch))
        self.saved[0, microbatch.size] = self._kept(saved)
        with self.engine.backward(), saved.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.recomputed = saved.recomputed
        self.note_unsharded()

    def counted(self, microbatch: Microbatch) -> SavedBytes:
        """Make the context that counts what a forward saves, but for parameters and the batch."""
        flats = self.engine.flats
        return SavedBytes([flat.full for flat in flats] + tensors_in(microbatch.content))

    def _kept(self, saved: SavedBytes) -> Kept:
        saved.stay(self.model.module.buffers())
        return Kept(saved.total, saved.moving if self.options.engine.activation_offload else ())

    def hand_over(self, is_used: Callable[[nn.Parameter], bool]) -> None:
        """Sum the gradients of tied parameters, and give those of used ones to the engine."""
        for param in self._trained:
            ranks = self._owners[param]
            param.grad = None  # of another rank that has it, too
            if len(ranks) > 1:
                ties = SimulatedCollectives(ranks.index(self.rank), len(ranks))
                ties.all_reduce(self.gradient(param)).wait()
                self._add("pp", ties.traffic)
        with self.engine.backward():
            for param in self._trained:
                if len(self._owners[param]) > 1 or is_used(param):
                    self.engine.take_gradient(param, self.gradient(param))

    def gradient(self, param: nn.Parameter) -> Tensor:
        """Return what stands for the sum of a parameter's gradients."""
        return param.data.new_empty(self.model.parts[param].shape, dtype=sum_dtype(param))

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Count a message of tensors to another rank of the pipeline."""
        self._pipeline.send_all(tensors)

    def count(self, weight: int = 1) -> None:
        """Add the bytes that the groups have counted since the last time, `weight` times."""
        for axis, groups in self._groups.items():
            for group in groups:
                self._add(axis, group.traffic, weight)
                group.traffic.reset()

    def _add(self, axis: Axis, traffic: Traffic, weight: int = 1) -> None:
        self.sent[axis] += weight * traffic.total_bytes
        self.sent_elements[axis] += weight * traffic.total_elements

    def note_unsharded(self) -> None:
        """Note the units that stage 3 has full now."""
        if self.options.engine.stage == 3:
            self._gathered = max(self._gathered, storage_bytes(f.full for f in self.engine.flats))

    @property
    def _kept_after_forward(self) -> int:
        """Bytes of second copies, all of which are there when a backward begins."""
        flats = [flat for one in self.engine.units if not one.stays for flat in one.flats]
        return sum(one.secondary.num_bytes(one.full) for one in flats if one.secondary is not None)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the stages on this rank; 0 without a pipeline."""
        if self.options.cut is None:
            return 0
        return sum(len(self.model.staged.partition.modules(stage)) for stage in self.stages)

    @property
    def num_own_parameters(self) -> int:
        """Number of elements of this rank's part of the parameters."""
        return sum(self.model.parts[param].shape.numel() for param in self._here)

    def memory(self, activations: ActivationBytes) -> RankMemory:
        """Return the memory held when the optimizer steps, and publish the updated parameters."""
        engine = self.engine
        with engine.optimizer_view():
            counted = held(engine, ())
            trained_bytes = sum(param.data.nbytes for param in self._trained)
            state = round(self.options.state_values * trained_bytes)
        engine.publish(self._trained)
        is_sharded, in_pipeline = self.options.engine.stage == 3, self.options.cut is not None
        gathered = max(self._gathered, largest_units(engine)) if is_sharded else 0
        gathered += self._kept_after_forward
        in_flight = sum(self.gradient(one).nbytes for one in self._trained) if in_pipeline else 0
        found = RankMemory(
            parameters=counted.parameters,
            gathered=gathered,
            gradients=counted.gradients,
            gradients_in_flight=in_flight,
            optimizer_state=state,
            activations=activations.on_device,
            recomputed=self.recomputed,
            offloaded=activations.on_host,
        )
        return found if self.options.offload is None else self._offloaded(found)

    def _offloaded(self, found: RankMemory) -> RankMemory:
        """Return what is held where shards, their gradients and state lie in host memory."""
        flats, stage = self.engine.flats, self.options.engine.stage
        masters = sum(flat.shard.nbytes for flat in flats)
        gradients = sum(flat.shard.nbytes for flat in flats if flat.is_trained)
        if stage == 3:  # where shards of parameters are on the device if they are not offloaded
            parameters = masters if self.options.offload == "optimizer" else 0
        else:
            parameters = sum(flat.full.nbytes for flat in flats)
        return replace(
            found,
            parameters=parameters,
            gradients=found.gradients if stage < 2 else 0,
            optimizer_state=0,
            offloaded=found.offloaded + masters + gradients + found.optimizer_state,
        )

    def begin_step(self) -> None:
        """Forget what has been sent, and the gradients of the last step."""
        self.count()
        self.sent = dict.fromkeys(self._groups, 0)
        self.sent_elements = dict(self.sent)
        for param in self._trained:
            param.grad = None

    def in_step(self) -> ExitStack:
        """Return the contexts in which a step runs, to be closed before `hand_over`."""
        stack = ExitStack()
        stack.enter_context(self.engine.step())
        return stack


class _SimulatedSplit(Unsplit):
    """The split of the model: which parameters are here, and the full shapes of parts."""

    def __init__(
        self,
        here: Container[nn.Parameter],
        elsewhere: Mapping[nn.Parameter, torch.Size],
        splits: Sequence[ModelSplit],
    ) -> None:
        self._here, self._apart = here, [one for one in splits if one.fewer_ranks]
        self.full_shapes = dict(elsewhere)
        for one in reversed(splits):
            self.full_shapes |= one.full_shapes
        self.fewer_ranks = [fewer for one in self._apart for fewer in one.fewer_ranks]
        self.undivided = {module for one in self._apart for module in one.undivided}

    def groups_of(self, param: nn.Parameter) -> Sequence[Collectives]:
        """Return the groups of a parameter that is averaged over fewer ranks; none of others."""
        return [group for one in self._apart for group in one.groups_of(param)]

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether a stage of this rank has `param`."""
        return param in self._here


def _data_groups(options: WorldOptions) -> DataGroups:
    size, shard_size = options.num_averaging, options.shard_size
    dp = SimulatedCollectives(0, size)
    if shard_size == size:
        return DataGroups.of(dp).with_secondary(options.engine.reshard_after_forward)
    shard = SimulatedCollectives(0, shard_size)
    replicate = SimulatedCollectives(0, size // shard_size)
    return DataGroups(dp=dp, shard=shard, replicate=replicate)


def largest_units(engine: DataParallelEngine) -> int:
    """Return the bytes of the units that stage 3 would have full at a time."""
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for unit in engine.units:
        sizes[unit.is_root].append(sum(flat.full.nbytes for flat in unit.flats))
    return sum(sizes[True]) + sum(sorted(sizes[False])[-_FULL_AT_ONCE:])


class _Engines:
    """The engines of a pipeline's ranks; that of the rank at work answers if it has what is asked.

    Attributes:
        at_work: The rank whose action runs.
    """

    device = torch.device("cpu")

    def __init__(self, ranks: Sequence[SimulatedRank]) -> None:
        self._ranks, self.at_work = ranks, ranks[0]
        self.reformats = self.at_work.engine.reformats

    @contextmanager
    def at_hand(self, params: Sequence[nn.Parameter], *, unrounded: bool = False) -> Iterator[None]:
        """Keep parameters unsharded inside: see `DataParallelEngine.at_hand`."""
        rank = next(one for one in (self.at_work, *self._ranks) if one.has(params))
        with rank.engine.at_hand(params, unrounded=unrounded):
            rank.note_unsharded()
            yield


class SimulatedPipeline(Pipeline):
    """The runner that trains, with all stages, whose ranks share a model without elements.

    It takes the actions of all ranks in the order in which they would come, and counts each with
    its rank.
    """

    def __init__(
        self, model: SimulatedModel, table: Schedule, microbatches: Sequence[Microbatch]
    ) -> None:
        self.ranks = [SimulatedRank(rank, model) for rank in range(table.num_ranks)]
        self.timeline, self._table = replay(table), table
        self._whole, self._microbatches = model, microbatches
        self._engines = _Engines(self.ranks)
        self._owners = [self.ranks[rank] for rank in table.stage_ranks]
        sizes = [one.size for one in microbatches]
        every = model.options.engine.stage == 3
        self._weights = {  # how many microbatches each one that is run counts for
            index: 1 if every else sizes.count(size)
            for index, size in enumerate(sizes)
            if every or sizes.index(size) == index
        }
        group, staged, here = SimulatedCollectives(0, 1), model.staged, (0,) * table.num_stages
        merged = replace(table, num_ranks=1, stage_ranks=here, actions=(self._merged(),))
        params = {stage: rank.params(stage) for stage, rank in enumerate(self._owners)}
        engines: Any = self._engines
        args = staged, group, params, lambda _: merged, here, engines, None
        super().__init__(*args, early=False, randomness=StageRandomness(group, engines.device))
        self._buffers = StepBuffers(staged, group, 0, has_last=False)  # without values to compare

    def _merged(self) -> tuple[Action, ...]:
        """Return the computations of all ranks, each after those whose results it needs."""
        events = sorted(chain(*self.timeline.rows), key=lambda event: event.start)
        return tuple(one.action for one in events if one.action.microbatch in self._weights)

    def run(self) -> None:
        """Run a step on every rank, up to the optimizer's."""
        self._run_whole_step()
        if self._lending.loans and "tp" in self._whole.groups:
            raise ConfigError(
                "A dry run does not count what layers that share their values send where stages of "
                "the pipeline lend each other parameters; expected a step that uses each parameter "
                "on its own stage. Let the optimizer's weight_decay do what concerns the weights "
                "alone, or use strategy='zero3'."
            )
        if self._whole.options.engine.stage == 3 or self._lending.loans:
            self._run_whole_step()  # the first has gathered nothing ahead, and learnt of loans

    def _run_whole_step(self) -> None:
        in_parts = len(self._microbatches) > 1
        for rank in self.ranks:
            rank.begin_step()
            for group in rank.engine.groups_of_forwards() if in_parts else ():
                group.all_reduce(torch.zeros(1, dtype=torch.int64), "min").wait()  # of parts
        steps = [rank.in_step() for rank in self.ranks]
        results, stash = self.train("training", self._microbatches, self._user_step, _loss_if_any)
        if results.get(0) is None:
            loss_of(None)  # which refuses it
        self._count_loans()
        for rank, step in zip(self.ranks, steps, strict=True):
            step.close()
            rank.hand_over(stash.holds)
            rank.count()

    def _user_step(self, microbatch: Microbatch, _: Any) -> Any:
        with tensors_given() as given, asking(OfLastStage(given)):
            return self._whole.step(microbatch)

    def _count_loans(self) -> None:
        """Count what stages are lent of others' parameters, and the gradients that come back."""
        for stage, param in self._lending.loans:
            borrower, owner = self._owners[stage], self._owners[self._whole.stages[param][0]]
            if owner is not borrower:
                owner.send([self._whole.parts[param]])
                borrower.send([owner.gradient(param)])

    @override
    def _act(self, batch: RunningBatch, action: Action) -> None:
        stage, kind, index = action
        rank = self._engines.at_work = self._owners[stage]
        with rank.backward(stage, index) if kind == "B" else nullcontext():
            super()._act(batch, action)
        rank.note_unsharded()
        to, _, _ = action.output
        if kind != "W" and 0 <= to < self.num_stages and self._owners[to] is not rank:
            is_forward, key = kind == "F", (stage, index)
            rank.send(batch.runs[key].outputs if is_forward else batch.grads[key])
        rank.count(self._weights[index])

    @override
    def _run_step(self, run: StageRun, batch: RunningBatch, microbatch: Microbatch) -> None:
        rank = self._owners[run.stage]
        with rank.counted(microbatch) as saved:
            super()._run_step(run, batch, microbatch)
        rank.keep(run.stage, microbatch, saved, [*run.inputs, *run.outputs])

    def activations_of(self, rank: SimulatedRank) -> ActivationBytes:
        """Return the most bytes that a rank keeps for the backwards to come."""
        return peak(state.values() for state in self._in_flight(rank))

    def _in_flight(self, rank: SimulatedRank) -> Iterator[dict[StageInput, Kept]]:
        """Yield what is kept after each of a rank's actions, by stage and microbatch."""
        state: dict[StageInput, Kept] = {}
        for stage, kind, index in self._table.actions[rank.rank]:
            if kind == "F":
                size = self._microbatches[index].size
                state[stage, kind, index] = rank.saved.get((stage, size), Kept(0))
                yield state
            elif kind in ("B", "W"):
                state.pop((stage, "F", index), None)


def _loss_if_any(result: Any) -> Tensor | None:
    return None if result is None else loss_of(result)


def run_unpipelined(rank: SimulatedRank, batch: Microbatch) -> ActivationBytes:
    """Run a step of a model that is full on its rank; return what is kept for the backward."""
    rank.begin_step()
    with rank.in_step():
        rank.train_full(batch)
    rank.count()
    return at_once([rank.saved[0, batch.size]])


@contextmanager
def apart(stand_ins: NoElements) -> Iterator[None]:
    """Restore the random streams and suppress warnings; compiled code runs as written inside."""
    computing: Any = WithoutElements(stand_ins.mode)  # which torch does not annotate
    with warnings.catch_warnings(), random_streams_kept(), computing, uncompiled():
        warnings.simplefilter("ignore")  # of addresses that tensors without elements do not have
        yield


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is entered.

        op ──> result ──> its storage is alive until nobody has it
                          alive  ▁▃▅▇█▇▅▃     most: what an allocator must have had at one time

    It sees real tensors and those without elements alike. What an operation allocates inside and
    frees before it returns is not seen, nor is what an allocator rounds up.

    Attributes:
        moved: Bytes of arguments and results of operations that compute: what has gone through
            memory where nothing is fused. Matrix products, attention and convolutions do not count:
            their time is that of their arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = self.moved = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results, given = _tensors(result), _tensors((args, kwargs))
        keys = {storage_key(one) for one in given}
        for one in results:
            if storage_key(one) not in keys:  # else a view, or written in place
                self._note(one)
        is_arithmetic = getattr(func, "overloadpacket", None) in flop_registry
        if not is_arithmetic and any(storage_key(one) not in keys for one in results):
            self.moved += sum(one.nbytes for one in (*given, *results))
        return result

    def _note(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper, whose own tensors are seen
            return
        key, size = storage_key(tensor), storage.nbytes()
        if key not in self._known:
            self._known[key] = size
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.alive -= self._known.pop(key, 0)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in values, of a sparse one those that it consists of."""
    found = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [
        part
        for one in found
        for part in ((one._indices(), one._values()) if one.is_sparse else (one,))
    ]


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What one rank's forward and backward of one batch take, in bytes.

    Attributes:
        saved: What forward keeps for backward.
        most: The most that is alive at one time of what the step makes itself, which parameters and
            their gradients are not.
        moved: Bytes that operations read and write, as `LiveBytes` counts them.
        sent: What this rank sends its tensor-parallel peers.
    """

    saved: int
    most: int
    moved: int
    sent: int


def trace_step(model: SimulatedModel, batch: Any) -> StepTrace:
    """Run a step of a full model, in no pipeline, on one simulated rank."""
    if model.options.cut is not None:
        raise ConfigError("A step is traced on one rank, but the options have a pipeline.")
    (content,) = split_batch(batch, 1, BatchReader("fields"))
    rank, live = SimulatedRank(0, model), LiveBytes()
    run_unpipelined(rank, content)  # apart: to count what is saved keeps it alive
    saved, sent = rank.saved[0, content.size].total, rank.sent["tp"]
    rank.begin_step()  # with the gradients of a step before
    with rank.in_step(), live:
        loss = loss_of(model.step(content))
        with rank.engine.backward():
            loss.backward()  # type: ignore[no-untyped-call]
    return StepTrace(saved=saved, most=live.most, moved=live.moved, sent=sent)
