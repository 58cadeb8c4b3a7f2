"""One rank of a simulated pipeline: its part of the model, and what it does with microbatches.

    module ──stand-ins──> split layers ──> own stages ──> engine       as on a real rank,
               │              tp               pp           dp          over groups of one
               └ without elements

Everything that trains is the code that trains; only the groups are `SimulatedCollectives`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.mesh import Axis, ParallelMesh
from lightning_shard.pipeline_parallel.backward import full_backward
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.partition import Partition, parameter_stages
from lightning_shard.pipeline_parallel.stage_run import Needed, Probe, StageRun
from lightning_shard.pipeline_parallel.staged_model import Run, StagedModel
from lightning_shard.pipeline_parallel.leaves import tensors_in
from lightning_shard.planner.no_elements import SavedBytes, storage_bytes
from lightning_shard.planner.report import RankMemory
from lightning_shard.planner.simulated_group import SimulatedCollectives
from lightning_shard.planner.skips import Skips
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.split import SplitModel

Step = Callable[[nn.Module, Any], Any]
"""Runs the user's training step of a module on the content of a microbatch."""
_GATHERED_AT_ONCE = 2  # units under ZeRO stage 3: the one in use and the next


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What all ranks of a simulated world have in common.

    Attributes:
        mesh: The ranks.
        engine: Of the data-parallel engine.
        shard_size: Data-parallel ranks that share out one copy of the state.
        layers: What the plan splits, by names of the user's module.
        cut: Cuts a model, whose layers are split, into stages; None without a pipeline.
        stage_ranks: The rank of each stage.
        sequence_parallel: Whether activations between split layers are in slices.
        step: Of training.
        state_values: What the optimizer keeps for each trained parameter.
    """

    mesh: ParallelMesh
    engine: EngineOptions
    shard_size: int
    layers: Sequence[PlannedLayer]
    cut: Callable[[nn.Module], Partition] | None
    stage_ranks: tuple[int, ...]
    sequence_parallel: bool
    step: Step
    state_values: int


class SimulatedRank:
    """Rank `rank` of a pipeline, the first of its tensor-parallel and data-parallel groups.

    Args:
        rank: In the pipeline.
        model: Without elements; this rank's own.
        options: As for the others.
        skips: What is known of skipped blocks, shared with the others.

    Attributes:
        sent: Bytes along each axis so far.
        saved: Bytes that the backward of a stage needs of one microbatch, by stage and size.
    """

    def __init__(
        self, rank: int, model: nn.Module, options: RankOptions, skips: Skips | None = None
    ) -> None:
        self.rank, self.model, self.options = rank, model, options
        self._skips = skips or Skips()
        mesh = options.mesh
        self._pipeline = SimulatedCollectives(rank, mesh.pp)
        self._layers = SimulatedCollectives(0, mesh.tp)
        data, own = _data_groups(mesh.dp, options.shard_size)
        self._groups: dict[Axis, Sequence[Collectives]] = {
            "pp": [self._pipeline],
            "dp": own,
            "tp": [self._layers],
        }
        self.num_parameters = sum(param.numel() for param in model.parameters())
        full_shapes = self._split_layers()
        self._shapes = {param: param.shape for param in model.parameters()}
        self.stages = tuple(s for s, owner in enumerate(options.stage_ranks) if owner == rank)
        self._owners = self._split_stages()
        self._here = [param for param, ranks in self._owners.items() if rank in ranks]
        elsewhere = {p: s for p, s in self._shapes.items() if rank not in self._owners[p]}
        self.engine = DataParallelEngine(
            model,
            data,
            options.engine,
            data,
            _Split(self._here, elsewhere | full_shapes),
        )
        self.saved: dict[tuple[int, int], int] = {}
        self.sent: dict[Axis, int] = dict.fromkeys(self._groups, 0)
        self._runs: dict[tuple[int, int], StageRun] = {}
        self._used: set[nn.Parameter] = set()
        self._gathered = 0
        self.count(0)  # what setting up has sent is not of a step

    def _split_layers(self) -> dict[nn.Parameter, torch.Size]:
        layers = [
            replace(one, module=self.model.get_submodule(one.name)) for one in self.options.layers
        ]
        if self.options.mesh.tp == 1:
            return {}
        return SplitModel(
            self.model,
            layers,
            self._layers,
            sequence_parallel=self.options.sequence_parallel,
        ).full_shapes

    def _split_stages(self) -> Mapping[nn.Parameter, tuple[int, ...]]:
        """Leave the parameters of other ranks without memory; return the ranks of each."""
        if self.options.cut is None:
            return dict.fromkeys(self._shapes, (self.rank,))
        partition = self.options.cut(self.model)
        stages = parameter_stages(self.model, partition)
        owners = {
            param: tuple(sorted({self.options.stage_ranks[stage] for stage in own}))
            for param, own in stages.items()
        }
        for param, ranks in owners.items():
            if self.rank not in ranks:
                param.data = param.data.new_empty(0)
        self._staged = StagedModel(self.model, partition, stages, self._shapes)
        self._stage_params = {
            stage: [param for param, own in stages.items() if stage in own and param.requires_grad]
            for stage in self.stages
        }
        return owners

    def probe(self, stage: int, microbatch: Microbatch) -> Probe:
        """Run a step up to a stage's first block.

        Raises:
            UnknownResultError: A block before it cannot be skipped unless `hint` says how.
        """
        probe = Probe(self._staged.partition.bounds[stage])
        with self._staged.buffers_kept(), self._running(probe, stage):
            probe.forward(lambda: self._step(microbatch))
        return probe

    def _running(self, run: Run, stage: int) -> AbstractContextManager[None]:
        blocks = self._staged.partition.blocks.modules
        return self._staged.running(self._skips.watch(run, blocks), stage)

    def learn(self, probe: Probe) -> None:
        """Take over what block 0 returns."""
        self._staged.hint = probe.template

    def _step(self, microbatch: Microbatch) -> Any:
        try:
            return self.options.step(self.model, microbatch.content)
        except ShardError:
            raise
        except Exception as error:
            raise ConfigError(
                f"A dry run takes a step of {type(self.model).__name__} on tensors without "
                f"elements, which failed ({type(error).__name__}: {error}); expected a "
                f"training_step that asks for the shapes of tensors only, and needs no trainer."
            ) from error

    def forward(
        self,
        stage: int,
        microbatch: Microbatch,
        received: Sequence[Tensor] | None,
        needed: Needed | None,
    ) -> list[Tensor]:
        """Run one microbatch through a stage; return what the next one needs."""
        bounds, names = self._staged.partition.bounds, self._staged.block_names
        run = StageRun(
            stage, bounds[stage], bounds[stage + 1], names, needed=needed, received=received
        )
        with self._saved_bytes(microbatch) as saved, self._running(run, stage):
            run.forward(lambda: self._step(microbatch))
        saved.add([*run.inputs, *run.outputs])
        self.saved[stage, microbatch.size] = saved.total
        self._runs[stage, microbatch.index] = run
        self._look_at_gathered()
        return run.outputs

    def backward(
        self, stage: int, microbatch: Microbatch, grads: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Run its backward; return the gradients of what was received."""
        run, params = self._runs.pop((stage, microbatch.index)), self._stage_params[stage]
        roots = followed(run.outputs) if grads is not None else followed([loss_of(run.result)])
        with self._running(run, stage):
            inputs, found = full_backward(roots, grads, followed(run.inputs), params)
        self._used.update(p for p, grad in zip(params, found, strict=True) if grad is not None)
        self._look_at_gathered()
        return inputs

    def train_whole(self, microbatch: Microbatch) -> None:
        """Run a step of a model that is in no pipeline, and hand its gradients to the engine."""
        with self._saved_bytes(microbatch) as saved:
            loss = loss_of(self._step(microbatch))
        self.saved[0, microbatch.size] = saved.total
        with self.engine.backward():
            loss.backward()
        self._look_at_gathered()

    def _saved_bytes(self, microbatch: Microbatch) -> SavedBytes:
        flats = self.engine.flats
        return SavedBytes([flat.full for flat in flats] + tensors_in(microbatch.content))

    def hand_over(self) -> None:
        """Sum the gradients of tied parameters, and give all to the engine."""
        for param in self._here:
            ranks = self._owners[param]
            if len(ranks) > 1 and param.requires_grad:
                ties = SimulatedCollectives(ranks.index(self.rank), len(ranks))
                ties.all_reduce(self._gradient(param)).wait()
                self.sent["pp"] += ties.traffic.total_bytes
                self._used.add(param)
        with self.engine.backward():
            for param in self._here:
                if param in self._used:
                    self.engine.take_gradient(param, self._gradient(param))

    def _gradient(self, param: nn.Parameter) -> Tensor:
        return param.data.new_empty(self._shapes[param], dtype=_stash_dtype(param))

    def send(self, tensors: Sequence[Tensor], weight: int) -> None:
        """Count messages to the next or previous rank, `weight` times."""
        self._pipeline.send_all(tensors)
        self.count(weight)

    def count(self, weight: int = 1) -> None:
        """Add what the groups have counted since the last time, `weight` times."""
        for axis, groups in self._groups.items():
            for group in groups:
                self.sent[axis] += weight * group.traffic.total_bytes
                group.traffic.reset()

    def _look_at_gathered(self) -> None:
        if self.options.engine.stage == 3:
            self._gathered = max(self._gathered, storage_bytes(f.full for f in self.engine.flats))

    @property
    def num_blocks(self) -> int:
        """Blocks of the stages on this rank; 0 without a pipeline."""
        if self.options.cut is None:
            return 0
        return sum(len(self._staged.partition.modules(stage)) for stage in self.stages)

    @property
    def num_own_parameters(self) -> int:
        """Elements of this rank's part of the parameters."""
        return sum(self._shapes[param].numel() for param in self._here)

    def memory(self, activations: int) -> RankMemory:
        """Return what this rank holds when the optimizer steps, and let that publish its work."""
        engine = self.engine
        trained = [param for param in self._here if param.requires_grad]
        with engine.optimizer_view():
            flats = engine.flats
            parameters = storage_bytes(t for flat in flats for t in (flat.full, flat.shard))
            gradients = storage_bytes(t for one in engine.gradients for t in one.buffers())
            state = self.options.state_values * sum(param.data.nbytes for param in trained)
        engine.publish(trained)
        in_pipeline = self.options.cut is not None
        return RankMemory(
            parameters=parameters,
            gathered=self._most_gathered(),
            gradients=gradients,
            gradients_in_flight=sum(map(self._gradient_bytes, trained)) if in_pipeline else 0,
            optimizer_state=state,
            activations=activations,
        )

    def _most_gathered(self) -> int:
        if self.options.engine.stage < 3:
            return 0
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for unit in self.engine.units:
            sizes[unit.resident].append(
                sum(flat.full.numel() * flat.full.itemsize for flat in unit.flats)
            )
        largest = sorted(sizes[False])[-_GATHERED_AT_ONCE:]
        return max(self._gathered, sum(sizes[True]) + sum(largest))

    def _gradient_bytes(self, param: nn.Parameter) -> int:
        return self._shapes[param].numel() * _stash_dtype(param).itemsize

    def in_step(self) -> ExitStack:
        """Return what a step runs in; to be closed before `hand_over`."""
        stack = ExitStack()
        stack.enter_context(self.engine.step())
        return stack


class _Split(Unsplit):
    """Which parameters are here, and what parts are parts of."""

    def __init__(
        self, here: Sequence[nn.Parameter], full_shapes: Mapping[nn.Parameter, torch.Size]
    ) -> None:
        self._here = set(here)
        self.full_shapes = full_shapes

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether a stage of this rank has `param`."""
        return param in self._here


def _data_groups(size: int, shard_size: int) -> tuple[DataGroups, list[Collectives]]:
    """Make the groups of data-parallel ranks, and return them as a list, too."""
    everyone = SimulatedCollectives(0, size)
    if shard_size == size:
        return DataGroups(everyone=everyone, shard=everyone), [everyone]
    shard = SimulatedCollectives(0, shard_size)
    replicate = SimulatedCollectives(0, size // shard_size)
    groups = DataGroups(everyone=everyone, shard=shard, replicate=replicate)
    return groups, [everyone, shard, replicate]


def followed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those of some tensors that have gradients."""
    return [tensor for tensor in tensors if tensor.requires_grad]


def loss_of(result: Any) -> Tensor:
    """Return the loss that a step has returned.

    Raises:
        ConfigError: There is none that requires a gradient.
    """
    found = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(found, Tensor) or not found.requires_grad:
        raise ConfigError(
            f"training_step returned {type(result).__name__} without a loss that requires a "
            f"gradient, expected one: a dry run goes through its backward."
        )
    return found


def _stash_dtype(param: Tensor) -> torch.dtype:
    """Return the format in which microbatches' gradients add up, at least float32."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
