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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.mesh import ALL_AXES, Axis
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
from lightning_shard.pipeline_parallel.gradients import (
    OfLastStage,
    Rest,
    full_backward,
    input_backward,
    sum_dtype,
    weight_backward,
)
from lightning_shard.pipeline_parallel.messages import followed
from lightning_shard.pipeline_parallel.microbatches import BatchReader, Microbatch, split_batch
from lightning_shard.pipeline_parallel.schedules import Action, Schedule, StageInput
from lightning_shard.pipeline_parallel.skipped_blocks import UnknownResultError, uncompiled
from lightning_shard.pipeline_parallel.stage_run import Needed, StageRun
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
        data = _data_groups(self.options.num_averaging, self.options.shard_size)
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
        self._runs: dict[tuple[int, int], tuple[StageRun, SavedBytes]] = {}
        self._halves: dict[tuple[int, int], Rest] = {}
        self._used: set[nn.Parameter] = set()
        self._gathered = 0

    def forward(
        self,
        stage: int,
        microbatch: Microbatch,
        received: Sequence[Tensor] | None,
        needed: Needed | None,
    ) -> list[Tensor]:
        """Run one microbatch through a stage; return the tensors that the next stage needs."""
        bounds, names = self.model.staged.partition.bounds, self.model.staged.block_names
        run = StageRun(
            stage, bounds[stage], bounds[stage + 1], names, needed=needed, received=received
        )
        with (
            self._saved_bytes(microbatch) as saved,
            self.model.running(run, stage),
            tensors_given() as given,
            asking(OfLastStage(given)),
        ):
            run.forward(partial(self.model.step, microbatch))
        saved.keep([*run.inputs, *run.outputs])
        saved.stay([*run.inputs, *run.outputs])
        self.saved[stage, microbatch.size] = self._kept(saved)
        self._runs[stage, microbatch.index] = run, saved
        self._note_unsharded()
        return run.outputs

    def backward(
        self, stage: int, microbatch: Microbatch, grads: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Run a microbatch's backward; return the gradients of the received tensors."""
        (run, saved), params = self._runs.pop((stage, microbatch.index)), self._params(stage)
        with self.model.running(run, stage), saved.backward():
            inputs, found = full_backward(
                _roots(run, grads),
                grads,
                followed(run.inputs),
                params,
                reformatted=self.engine.reformats,
            )
        self._note_used(params, found)
        self.recomputed = max(self.recomputed, saved.recomputed)
        return inputs

    def backward_inputs(
        self, stage: int, microbatch: Microbatch, grads: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Run the first half of a backward; return the gradients of the received tensors."""
        (run, _), params = self._runs[stage, microbatch.index], self._params(stage)
        with self.model.running(run, stage):
            inputs, self._halves[stage, microbatch.index] = input_backward(
                _roots(run, grads), grads, followed(run.inputs), params, self._at_hand
            )
        self._note_unsharded()
        return inputs

    def backward_weights(self, stage: int, microbatch: Microbatch) -> None:
        """Run the second half of a backward: the gradients of the weights."""
        (run, _), params = self._runs.pop((stage, microbatch.index)), self._params(stage)
        rest = self._halves.pop((stage, microbatch.index))
        with self.model.running(run, stage):
            self._note_used(params, weight_backward(rest, params))

    def _params(self, stage: int) -> list[nn.Parameter]:
        return [param for param in self._trained if stage in self.model.stages[param]]

    @contextmanager
    def _at_hand(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        with self.engine.at_hand(params):
            self._note_unsharded()
            yield

    def _note_used(self, params: Sequence[nn.Parameter], found: Sequence[Tensor | None]) -> None:
        self._used.update(p for p, grad in zip(params, found, strict=True) if grad is not None)
        self._note_unsharded()

    def forward_full(self, microbatch: Microbatch) -> tuple[Tensor, SavedBytes]:
        """Run the forward of a model that is in no pipeline; return the loss and what is saved."""
        with self._saved_bytes(microbatch) as saved:
            loss = loss_of(self.model.step(microbatch))
        self.saved[0, microbatch.size] = self._kept(saved)
        return loss, saved

    def train_full(self, microbatch: Microbatch) -> None:
        """Run a step of a model that is in no pipeline, and hand its gradients to the engine."""
        loss, saved = self.forward_full(microbatch)
        with self.engine.backward(), saved.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.recomputed = saved.recomputed
        self._note_unsharded()

    def hold_gradients(self) -> None:
        """Let the engine have a gradient of each parameter, as after a step."""
        self._used.update(self._trained)
        self.hand_over()

    def _saved_bytes(self, microbatch: Microbatch) -> SavedBytes:
        flats = self.engine.flats
        return SavedBytes([flat.full for flat in flats] + tensors_in(microbatch.content))

    def _kept(self, saved: SavedBytes) -> Kept:
        saved.stay(self.model.module.buffers())
        return Kept(saved.total, saved.moving if self.options.engine.activation_offload else ())

    def hand_over(self) -> None:
        """Sum the gradients of tied parameters, and give all to the engine."""
        for param in self._trained:
            ranks = self._owners[param]
            param.grad = None  # of another rank that has it, too
            if len(ranks) > 1:
                ties = SimulatedCollectives(ranks.index(self.rank), len(ranks))
                ties.all_reduce(self._gradient(param)).wait()
                self._add("pp", ties.traffic)
                self._used.add(param)
        with self.engine.backward():
            for param in self._trained:
                if param in self._used:
                    self.engine.take_gradient(param, self._gradient(param))

    def _gradient(self, param: nn.Parameter) -> Tensor:
        return param.data.new_empty(self.model.parts[param].shape, dtype=sum_dtype(param))

    def send(self, tensors: Sequence[Tensor], weight: int) -> None:
        """Count messages to the next or previous rank, `weight` times."""
        self._pipeline.send_all(tensors)
        self.count(weight)

    def count(self, weight: int = 1) -> None:
        """Add the bytes that the groups have counted since the last time, `weight` times."""
        for axis, groups in self._groups.items():
            for group in groups:
                self._add(axis, group.traffic, weight)
                group.traffic.reset()

    def _add(self, axis: Axis, traffic: Traffic, weight: int = 1) -> None:
        self.sent[axis] += weight * traffic.total_bytes
        self.sent_elements[axis] += weight * traffic.total_elements

    def _note_unsharded(self) -> None:
        if self.options.engine.stage == 3:
            self._gathered = max(self._gathered, storage_bytes(f.full for f in self.engine.flats))

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
            state = self.options.state_values * sum(param.data.nbytes for param in self._trained)
        engine.publish(self._trained)
        is_sharded, in_pipeline = self.options.engine.stage == 3, self.options.cut is not None
        gathered = max(self._gathered, largest_units(engine)) if is_sharded else 0
        in_flight = sum(self._gradient(one).nbytes for one in self._trained) if in_pipeline else 0
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


def _data_groups(size: int, shard_size: int) -> DataGroups:
    dp = SimulatedCollectives(0, size)
    if shard_size == size:
        return DataGroups.of(dp)
    shard = SimulatedCollectives(0, shard_size)
    replicate = SimulatedCollectives(0, size // shard_size)
    return DataGroups(dp=dp, shard=shard, replicate=replicate)


def _roots(run: StageRun, grads: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the tensors at which a backward begins: the loss where no gradients are given."""
    return followed(run.outputs if grads is not None else [loss_of(run.result)])


def largest_units(engine: DataParallelEngine) -> int:
    """Return the bytes of the units that stage 3 would have full at a time."""
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for unit in engine.units:
        sizes[unit.is_root].append(sum(flat.full.nbytes for flat in unit.flats))
    return sum(sizes[True]) + sum(sorted(sizes[False])[-_FULL_AT_ONCE:])


_STEPS_OF_STAGE_3 = 2  # what is gathered ahead follows the step before


class SimulatedPipeline:
    """The ranks of one pipeline, which share a model without elements."""

    def __init__(
        self, model: SimulatedModel, schedule: Schedule, microbatches: Sequence[Microbatch]
    ) -> None:
        self._model = model
        self.ranks = [SimulatedRank(rank, model) for rank in range(schedule.num_ranks)]
        self.schedule, self.microbatches = schedule, microbatches
        sizes = [one.size for one in microbatches]
        every = model.options.engine.stage == 3
        self._weights = {  # how many microbatches each one that is run counts for
            index: 1 if every else sizes.count(size)
            for index, size in enumerate(sizes)
            if every or sizes.index(size) == index
        }
        self._made: dict[StageInput, list[Tensor]] = {}
        self._arrived: dict[StageInput, list[Tensor]] = {}
        self._needed: list[Needed | None] = []

    def run(self) -> None:
        """Run a step on every rank, up to the optimizer's."""
        with self._model.staged.batch():
            self._needed = self._needs()
        in_parts = len(self.microbatches) > 1
        for _ in range(_STEPS_OF_STAGE_3 if self._model.options.engine.stage == 3 else 1):
            self._run_step(in_parts=in_parts)

    def _run_step(self, *, in_parts: bool) -> None:
        for rank in self.ranks:
            rank.begin_step()
            for group in rank.engine.groups_of_forwards() if in_parts else ():
                group.all_reduce(torch.zeros(1, dtype=torch.int64), "min").wait()  # of parts
        with self._model.staged.batch():
            steps = [rank.in_step() for rank in self.ranks]
            self._run_actions()
        for rank, step in zip(self.ranks, steps, strict=True):
            step.close()
            rank.hand_over()
            rank.count()

    def _run_actions(self) -> None:
        waiting = [self._chosen(rank.rank) for rank in self.ranks]
        while any(waiting):
            for rank, actions in zip(self.ranks, waiting, strict=True):
                while actions and self._act(rank, actions[0]):
                    del actions[0]

    def _chosen(self, rank: int) -> list[Action]:
        return [one for one in self.schedule.actions[rank] if one.microbatch in self._weights]

    def _needs(self) -> list[Needed | None]:
        try:
            return self._probed()
        except UnknownResultError:
            self._model.staged.set_hint(self._model.probe(0, self.microbatches[0]).template)
            return self._probed()

    def _probed(self) -> list[Needed | None]:
        """Probe each stage with the smallest and then the largest microbatch."""
        for microbatch in (self.microbatches[-1], self.microbatches[0]):
            stages = range(1, self.schedule.num_stages)
            needs = [self._model.probe(stage, microbatch).needed for stage in stages]
        if None in needs:
            raise ConfigError(
                f"The training step ended without calling the first block of stage "
                f"{needs.index(None) + 1}, expected it to call the network once, all blocks in "
                f"order."
            )
        return [None, *needs, None]  # of the first stage, and after the last

    def _act(self, rank: SimulatedRank, action: Action) -> bool:
        """Do one action; return False when its message has not come."""
        weight = self._weights[action.microbatch]
        kind = action.kind
        if kind == "F":
            done = self._forward(rank, action)
        elif kind in ("B", "I"):
            done = self._backward(rank, action)
        elif kind == "W":
            rank.backward_weights(action.stage, self.microbatches[action.microbatch])
            done = True
        elif kind.startswith("SEND"):
            message = action.output
            self._arrived[message] = self._made.pop(message)
            rank.send(self._arrived[message], weight)
            return True
        else:
            return True
        rank.count(weight)
        return done

    def _forward(self, rank: SimulatedRank, action: Action) -> bool:
        stage, _, index = action
        if stage > 0 and (stage, "F", index) not in self._arrived:
            return False
        received = self._arrived.pop((stage, "F", index)) if stage > 0 else None
        outputs = rank.forward(stage, self.microbatches[index], received, self._needed[stage + 1])
        self._hand_on(rank, action, outputs)
        return True

    def _backward(self, rank: SimulatedRank, action: Action) -> bool:
        stage, _, index = action
        is_last = stage == self.schedule.num_stages - 1
        if not is_last and (stage, "B", index) not in self._arrived:
            return False
        grads = None if is_last else self._arrived.pop((stage, "B", index))
        run = rank.backward if action.kind == "B" else rank.backward_inputs
        self._hand_on(rank, action, run(stage, self.microbatches[index], grads))
        return True

    def _hand_on(self, rank: SimulatedRank, action: Action, tensors: Sequence[Tensor]) -> None:
        """Keep tensors for their message, or give them to this rank's own stage."""
        message = action.output
        is_here = message[0] in rank.stages
        (self._arrived if is_here else self._made)[message] = [
            one.detach().requires_grad_(one.requires_grad) for one in tensors
        ]

    def peak_activations(self, rank: SimulatedRank) -> ActivationBytes:
        """Return the most bytes that a rank keeps for the backwards to come."""
        return peak(state.values() for state in self._in_flight(rank))

    def _in_flight(self, rank: SimulatedRank) -> Iterator[dict[StageInput, Kept]]:
        """Yield what is kept after each of a rank's actions, by stage and microbatch."""
        state: dict[StageInput, Kept] = {}
        for stage, kind, index in self.schedule.actions[rank.rank]:
            if kind == "F":
                size = self.microbatches[index].size
                state[stage, kind, index] = rank.saved.get((stage, size), Kept(0))
                yield state
            elif kind in ("B", "W"):
                state.pop((stage, "F", index), None)


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
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), computing, uncompiled():
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
    rank.hold_gradients()
    rank.begin_step()
    with rank.in_step(), live:
        loss, _ = rank.forward_full(content)  # what is saved lives on in the graph alone
        with rank.engine.backward():
            loss.backward()  # type: ignore[no-untyped-call]
    rank.count()
    saved = rank.saved[0, content.size].total
    return StepTrace(saved=saved, most=live.most, moved=live.moved, sent=rank.sent["tp"])
