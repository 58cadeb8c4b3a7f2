"""One rank of a simulated pipeline: its engine, and its forwards and backwards.

stages of this rank ──> engine       over groups of which only this rank is there
       pp                 dp
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.mesh import ALL_AXES, Axis
from lightning_shard.core.placeholders import tensors_given
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.differentiation import asking
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import storage_bytes
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.pipeline_parallel.backward import (
    Rest,
    full_backward,
    input_backward,
    weight_backward,
)
from lightning_shard.pipeline_parallel.containers import tensors_in
from lightning_shard.pipeline_parallel.costs import SavedBytes
from lightning_shard.pipeline_parallel.gradients import OfLastStage, sum_dtype
from lightning_shard.pipeline_parallel.messages import followed
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.stage_run import Needed, StageRun
from lightning_shard.planning.report import ActivationBytes, Kept, RankMemory
from lightning_shard.planning.simulated_model import SimulatedCollectives, SimulatedModel, loss_of

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

    def train_full(self, microbatch: Microbatch) -> None:
        """Run a step of a model that is in no pipeline, and hand its gradients to the engine."""
        with self._saved_bytes(microbatch) as saved:
            loss = loss_of(self.model.step(microbatch))
        self.saved[0, microbatch.size] = self._kept(saved)
        with self.engine.backward(), saved.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.recomputed = saved.recomputed
        self._note_unsharded()

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
            flats = engine.flats
            parameters = storage_bytes(t for flat in flats for t in (flat.full, flat.shard))
            gradients = storage_bytes(t for one in engine.gradients for t in one.buffers())
            state = self.options.state_values * sum(param.data.nbytes for param in self._trained)
        engine.publish(self._trained)
        in_pipeline = self.options.cut is not None
        found = RankMemory(
            parameters=parameters,
            gathered=self._most_gathered(),
            gradients=gradients,
            gradients_in_flight=sum(map(self._gradient_bytes, self._trained)) if in_pipeline else 0,
            optimizer_state=state,
            activations=activations.on_device,
            recomputed=self.recomputed,
            offloaded=activations.on_host,
        )
        return found if self.options.offload is None else self._offloaded(found)

    def _offloaded(self, found: RankMemory) -> RankMemory:
        """Return what is held where shards, their gradients and state lie in host memory."""
        flats, stage = self.engine.flats, self.options.engine.stage
        on_device = self.options.offload == "optimizer" and stage == 3  # shards, too
        masters = {flat: flat.shard.numel() * flat.shard.itemsize for flat in flats}
        trained = [flat for flat in flats if flat.is_trained]
        parameters = 0
        for flat in flats:
            parameters += 0 if stage == 3 else flat.full.numel() * flat.full.itemsize
            parameters += flat.shard.numel() * flat.shard.itemsize if on_device else 0
        shards = sum(masters.values()) + sum(masters[flat] for flat in trained)
        return replace(
            found,
            parameters=parameters,
            gradients=found.gradients if stage < 2 else 0,
            optimizer_state=0,
            offloaded=found.offloaded + shards + found.optimizer_state,
        )

    def _most_gathered(self) -> int:
        if self.options.engine.stage < 3:
            return 0
        return max(self._gathered, largest_units(self.engine))

    def _gradient_bytes(self, param: nn.Parameter) -> int:
        return self.model.parts[param].shape.numel() * sum_dtype(param).itemsize

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
    """Make the groups of data-parallel ranks."""
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
        sizes[unit.is_root].append(
            sum(flat.full.numel() * flat.full.itemsize for flat in unit.flats)
        )
    return sum(sizes[True]) + sum(sorted(sizes[False])[-_FULL_AT_ONCE:])
