"""Pipeline parallel as a dimension: consecutive layers on each rank, microbatches in flight."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.random_state import load_random_state, random_state
from lightning_shard.core.modules import refuse_scripted_parts
from lightning_shard.core.options import AtLeastOne, AxisSize, Limit, Options
from lightning_shard.core.states import MakesContext
from lightning_shard.data_parallel.agreement import check_same_model, refuse_embeddings_of_batches
from lightning_shard.data_parallel.differentiation import asking
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.leftovers import refuse_leftover_shards
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import UnitOptions
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.pipeline_parallel.blocks import BlockList, check_calls, find_blocks
from lightning_shard.pipeline_parallel.gradients import AfterSchedule
from lightning_shard.pipeline_parallel.messages import packed, unpacked
from lightning_shard.pipeline_parallel.microbatches import BatchLists
from lightning_shard.pipeline_parallel.needs import StageRandomness
from lightning_shard.pipeline_parallel.partition import (
    BlockCosts,
    Partition,
    Split,
    partition_blocks,
)
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import (
    SCHEDULES,
    Schedule,
    default_stages_per_rank,
    make_schedule,
    place_stages,
    with_full_backwards,
)
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.pipeline_parallel.staged_model import StagedModel
from lightning_shard.pipeline_parallel.step_edits import EditMarks
from lightning_shard.pipeline_parallel.ties_in_order import TiesInOrder
from lightning_shard.planning.description import Description, Measure
from lightning_shard.strategies.dimensions.dimension import (
    DimensionOptions,
    ParallelDimension,
    PlainRunner,
    RunView,
    StepRunner,
)
from lightning_shard.strategies.dimensions.microbatched_steps import MicrobatchedSteps
from lightning_shard.strategies.trainer.layer_sync import batch_norms
from lightning_shard.strategies.trainer.logs.step_logs import StepLogs
from lightning_shard.strategies.trainer.measured_stages import measured_costs

# How a pipeline is cut into stages and what runs when: the options, and what follows from them.

_NAME = Limit(f"that is one of {', '.join(SCHEDULES)}", SCHEDULES.__contains__)
_FIRST_BLOCKS = Limit("(the first block of each stage but the first)")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """How a pipeline is cut into stages, and what runs when.

    Attributes:
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble",
            "zbv" or "dual_pipe_v".
        num_microbatches: Microbatches of each batch; by default twice the ranks of the pipeline;
            they need not be equal. A batch of fewer samples has one for each.
        blocks: Path of the list of repeated blocks; found where there is one.
        split: What the stages have alike: "parameters", "flops" or "memory" (measured in the
            first batch); or the first block of each stage but the first.
        batch_lists: What lists and tuples in a batch are that can be read in two ways: "samples",
            one value for each, or "fields", each of all samples. "auto" goes by the loader, refuses
            what it cannot tell, and leaves batches of samples of different shapes whole.
    """

    schedule: Annotated[str, _NAME] = "1f1b"
    num_microbatches: AtLeastOne | None = None
    blocks: str | None = None
    split: Split | Annotated[list[int], _FIRST_BLOCKS] = "parameters"
    batch_lists: BatchLists = "auto"


@dataclass(frozen=True, kw_only=True)
class StageOptions(ScheduleOptions):
    """What follows from a pipeline's options, and from whether halves of backwards are joined."""

    joins_halves: bool = False

    @property
    def measured(self) -> Literal["flops", "memory"] | None:
        """What has to be measured of the blocks before they are cut into stages; None: nothing."""
        return self.split if self.split in ("flops", "memory") else None

    def num_parts(self, num_ranks: int) -> int:
        """Return the microbatches of a batch that has as many samples."""
        return self.num_microbatches or 2 * num_ranks

    def num_stages(self, num_ranks: int) -> int:
        """Return the stages over all ranks of the pipeline."""
        if isinstance(self.split, list):
            return len(self.split) + 1
        return num_ranks * default_stages_per_rank(self.schedule)

    def stage_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        return place_stages(self.schedule, num_ranks, self.num_stages(num_ranks))

    def table(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts."""
        table = make_schedule(
            self.schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_stages=self.num_stages(num_ranks),
        )
        return with_full_backwards(table) if self.joins_halves else table

    def cut(
        self, model: nn.Module, blocks: BlockList, measured: BlockCosts | None, num_ranks: int
    ) -> Partition:
        """Cut a model into stages, by the blocks' measured costs where `split` asks for them."""
        return partition_blocks(
            model,
            blocks,
            num_stages=self.num_stages(num_ranks),
            split=self.split,
            measured=measured,
        )


_STATE_BYTES = 1 << 14  # of all generators, pickled


class PipelineDimension(ParallelDimension):
    """Each rank has some of the model's stages, and runs the whole step up to their end."""

    axis = "pp"

    def __init__(self, size: int | None, options: StageOptions) -> None:
        super().__init__(size)
        self.options = options
        self._run: RunView | None = None
        self._staged: StagedModel | None = None
        self._split: PipelineSplit | None = None
        self._pipeline: Pipeline | None = None
        self._logs: StepLogs | None = None
        self._steps: MicrobatchedSteps | None = None
        self._warned_of_bubble = False

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, from a run's set-up to its end; there is none on one rank alone."""
        if self._pipeline is None:
            raise ConfigError("There is no pipeline before the strategy's setup or after teardown.")
        return self._pipeline

    @override
    def check(self, run: RunView) -> None:
        num_ranks = run.mesh.size(self.axis)
        if self._is_cut(run):
            _check_steps(run.module)
            refuse_scripted_parts(run.model, "a pipeline")
            check_calls(run.model, find_blocks(run.model, self.options.blocks))
            if run.in_order is not None:
                self._check_order(run)
        num_parts = self.options.num_parts(num_ranks)
        is_in_parts = run.is_fitting and num_ranks > 1 and num_parts > 1
        if is_in_parts:
            refuse_embeddings_of_batches(run.model, f"a pipeline has {num_parts} parts of it")
        if is_in_parts and run.layer_sync is not None and batch_norms(run.model):
            raise ConfigError(
                f"sync_batchnorm=True asks for statistics of the whole batch, but a pipeline runs "
                f"its {num_parts} microbatches one after the other; expected a batch "
                f"in one part. Set num_microbatches=1, leave sync_batchnorm out (each microbatch "
                f"then has its own statistics), or use strategy='zero3'."
            )

    def _check_order(self, run: RunView) -> None:
        """Refuse microbatches whose number, or whose sums, would depend on the ranks."""
        number, num_others = self.options.num_microbatches, run.mesh.size("dp")
        num_others *= run.module.trainer.accumulate_grad_batches
        if number is None:
            raise ConfigError(
                f"Rank {run.rank}: same_bits=True, but the microbatches of a batch would be twice "
                f"the ranks of the pipeline, expected one number on any ranks. Set "
                f"num_microbatches."
            )
        if num_others > 1 and number & (number - 1):
            raise ConfigError(
                f"Rank {run.rank}: same_bits=True, but a step adds up {num_others} batches of "
                f"{number} microbatches, whose sums are no parts of the sum in order, expected "
                f"num_microbatches of 1, 2, 4, 8 ..., or one batch."
            )

    @override
    def brings_model(self, run: RunView) -> bool:
        return self._is_cut(run)  # so that no device holds other stages' layers

    def _is_cut(self, run: RunView) -> bool:
        """Whether batches run in microbatches; one rank alone has one stage, for the same bits."""
        asks = run.in_order is not None and self.options.num_microbatches is not None
        return asks or run.mesh.size(self.axis) > 1

    @override
    def split(self, run: RunView) -> ModelSplit | None:
        if not self._is_cut(run):
            return None
        num_ranks = run.mesh.size(self.axis)
        model, group = run.model, run.groups[self.axis]
        refuse_leftover_shards(model)
        check_same_model(model, group)
        self._run = run
        partition = self._stages(run, num_ranks)
        ranks = self.options.stage_ranks(num_ranks)
        # refused here, where nothing is changed
        self.options.table(num_ranks, self.options.num_parts(num_ranks))
        split = self._split = PipelineSplit(model, partition, ranks, group, run.device)
        known = split.param_stages, split.shapes, [*split.stage_params]
        self._staged = StagedModel(model, partition, *known, forget=run.forget_activations)
        logging = None if run.in_order is None else run.in_order.logging
        self._logs = StepLogs(run.module, group, ranks[-1], logging)
        return split

    def _stages(self, run: RunView, num_ranks: int) -> Partition:
        blocks = find_blocks(run.model, self.options.blocks)
        measured: BlockCosts | None = None
        if self.options.measured is not None:
            group = run.groups[self.axis]
            measured = measured_costs(run.module, blocks, self.options.measured, group)
        return self.options.cut(run.model, blocks, measured, num_ranks)

    @override
    def attach(self, engine: DataParallelEngine) -> None:
        if not (self._run and self._staged and self._split and self._logs):
            return
        self._pipeline = self._made(engine, self._run, self._staged, self._split)
        self.num_parts = self.options.num_parts(self._run.mesh.size(self.axis))
        self._steps = MicrobatchedSteps(
            self._run,
            engine,
            self._pipeline,
            self._split,
            self._logs,
            num_parts=self.num_parts,
            lists=self.options.batch_lists,
            on_training=self._warn_of_bubble,
        )

    def _made(
        self, engine: DataParallelEngine, run: RunView, staged: StagedModel, split: PipelineSplit
    ) -> Pipeline:
        num_ranks = run.mesh.size(self.axis)
        accumulates = run.module.trainer.accumulate_grad_batches > 1
        marks = EditMarks(engine, accumulates=accumulates) if run.is_fitting else None
        schedules = partial(self.options.table, num_ranks)
        ranks = self.options.stage_ranks(num_ranks)
        args = staged, split.group, split.stage_params, schedules, ranks, engine, marks
        with run.drawn_for_own_data():
            randomness = StageRandomness(split.group, engine.device)
        if run.in_order is not None:
            randomness = OneStream(split.group, engine.device, run.in_order.begin_microbatch)
        in_order = None if run.in_order is None else TiesInOrder(split)
        return Pipeline(*args, early=run.matches_tags, randomness=randomness, in_order=in_order)

    @override
    def backward_context(self) -> MakesContext | None:
        return None if self._split is None else partial(asking, AfterSchedule())

    @override
    def runner(self, inner: StepRunner) -> StepRunner:
        if self._steps is None:
            return inner
        assert isinstance(inner, PlainRunner), "the pipeline has to be the last dimension"
        return self._steps

    @override
    def check_gather(self, tensor: Tensor, *, sync_grads: bool) -> None:
        if self._steps is not None:
            self._steps.check_gather(tensor, sync_grads=sync_grads)

    @override
    def around_hook(self) -> AbstractContextManager[None]:
        if self._run is None or self._split is None:
            return nullcontext()
        absent = self._split.full_shapes
        params = self._run.module.named_parameters()
        return explaining_absent(name for name, param in params if param in absent)

    @override
    def follow(self) -> Mapping[Tensor, Callable[[], Tensor]]:
        return {} if self._split is None else self._split.follow()

    @override
    def finish_copies(self) -> None:
        if self._staged is not None:
            self._staged.restore_copies()

    @override
    def share_state(self) -> None:
        if self._split is not None and self._logs is not None:
            self._split.share_buffers()
            self._logs.share_persistent_metrics()

    @property
    @override
    def random_state(self) -> Any:
        return None if self._pipeline is None else self._pipeline.randomness.state

    @random_state.setter
    def random_state(self, state: Any) -> None:
        if self._pipeline is not None and state is not None:
            self._pipeline.randomness.state = state

    @override
    def restore(self, *, full: bool) -> None:
        if self._logs is not None:
            self._logs.restore()
        if self._staged is not None:
            self._staged.restore()
        if self._split is not None:
            self._split.restore(full=full)
        self._logs = self._staged = self._split = self._pipeline = None
        self._run = self._steps = None

    @override
    def described(
        self, found: Description, module: "pl.LightningModule", measure: Measure
    ) -> Description:
        options, num_ranks = self.options, found.mesh.size(self.axis)
        if num_ranks == 1:
            return found
        measured: BlockCosts | None = None
        if options.measured is not None:
            measured = measure(find_blocks(module, options.blocks), options.measured)

        def cut(model: nn.Module) -> Partition:
            return options.cut(model, find_blocks(model, options.blocks), measured, num_ranks)

        return replace(
            found,
            cut=cut,
            stage_ranks=options.stage_ranks(num_ranks),
            schedule=partial(options.table, num_ranks),
            num_microbatches=options.num_parts(num_ranks),
        )

    def _warn_of_bubble(self, num_microbatches: int) -> None:
        pipeline = self.pipeline
        if num_microbatches < pipeline.num_stages and not self._warned_of_bubble:
            self._warned_of_bubble = True
            assert self._run is not None
            ranks = self._run.mesh.size(self.axis)
            idle = (ranks - 1) / (num_microbatches + ranks - 1)
            rank_zero_warn(
                f"{num_microbatches} microbatches are fewer than the {pipeline.num_stages} stages: "
                f"expect each rank to be idle for about {idle:.0%} of a step. Set num_microbatches "
                f"to {4 * ranks} or more, with a batch of as many samples."
            )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ScheduleOptions, UnitOptions, DimensionOptions):
    """What pipeline parallelism takes.

    Attributes:
        pipeline_parallel_size: Ranks of one pipeline; by default all. What they leave of the world
            is data parallel.
    """

    pipeline_parallel_size: AtLeastOne | None = None

    @override
    def dimension(self) -> ParallelDimension:
        recomputes = self.activation_checkpointing is not None
        options = StageOptions(**self.part(ScheduleOptions), joins_halves=recomputes)
        return PipelineDimension(self.pipeline_parallel_size, options)


@dataclass(frozen=True, kw_only=True)
class PipelineAxis(PipelineOptions):
    """What pipeline parallelism takes beside other dimensions.

    Attributes:
        pipeline_parallel_size: Ranks of one pipeline.
    """

    pipeline_parallel_size: AxisSize = 1


class OneStream(StageRandomness):
    """The random numbers of a microbatch as one rank draws them, going on from stage to stage."""

    def __init__(
        self, group: Collectives, device: torch.device, begins: Callable[[int], None]
    ) -> None:
        super().__init__(group, device)
        self._begins = begins

    @override
    def begin(self, microbatch: int) -> None:
        self._begins(microbatch)

    @override
    def left(self) -> list[Tensor]:
        return [packed(random_state(self._device), _STATE_BYTES, self._device)]

    @override
    def taken_off(self, received: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return received[:-1], received[-1:]

    @override
    def enter(self, microbatch: int, stage: int, came: Sequence[Tensor] = ()) -> None:
        for state in came:
            load_random_state(unpacked(state), self._device)


def _check_steps(module: "pl.LightningModule") -> None:
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes by hand, but a pipeline runs training_step "
            f"once for each microbatch and stage, and would step the optimizer each time; "
            f"expected automatic optimization. Use strategy='zero3' for manual optimization."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(
            f"{type(module).__name__}.training_step takes the loader's iterator, expected the "
            f"batch, which a pipeline splits into microbatches."
        )


_OF_NOTHING = re.compile(r"\(0\)|\[0\]|\bsize 0\b|numel\(\) == 0|no identity")


@contextmanager
def explaining_absent(of_others: Iterable[str]) -> Iterator[None]:
    """Say which parameters other ranks have where user code inside fails on an empty tensor."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        names = [*of_others]
        if isinstance(error, ShardError) or not names or not _OF_NOTHING.search(str(error)):
            raise
        raise ConfigError(
            f"Between the steps of a pipeline each rank has the parameters of its own stages only: "
            f"{len(names)} of other stages, such as {names[0]!r}, have no elements here. A hook "
            f"met a tensor without elements ({error}), expected each rank to compute with what it "
            f"has. For an average of the weights use Lightning's EMAWeightAveraging or "
            f"WeightAveraging in place of a copy that is kept by hand, or use strategy='zero2'."
        ) from error
