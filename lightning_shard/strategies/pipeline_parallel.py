"""Pipeline parallelism as a Lightning strategy: stages of layers, batches in microbatches."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_shard.data_parallel.agreement import check_same_model
from lightning_shard.data_parallel.leftovers import refuse_leftover_shards
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.errors import ConfigError
from lightning_shard.mesh import Axis, ParallelMesh
from lightning_shard.pipeline_parallel.absent_advice import explaining_absent
from lightning_shard.pipeline_parallel.blocks import BlockList, check_calls, find_blocks
from lightning_shard.pipeline_parallel.gradients import GradientStash
from lightning_shard.pipeline_parallel.microbatches import (
    Microbatch,
    batch_size_of,
    merge_outputs,
    split_batch,
)
from lightning_shard.pipeline_parallel.partition import (
    BlockCosts,
    Partition,
    partition_blocks,
)
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import (
    Schedule,
    default_stages_per_rank,
    make_schedule,
    place_stages,
)
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.pipeline_parallel.staged_model import StagedModel
from lightning_shard.planner.description import Description, Measure
from lightning_shard.strategies.configs import (
    GradientConfig,
    PipelineParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.options import PipelineParallelOptions, SharedOptions
from lightning_shard.trainer._lightning import layer_sync
from lightning_shard.trainer.hook_advice import hooks_inside
from lightning_shard.trainer.layer_sync import batch_norms
from lightning_shard.trainer.measured_stages import measured_costs
from lightning_shard.trainer.step_logs import StepLogs


class PipelineParallelStrategy(ModelParallelStrategy):
    """Consecutive layers on each rank, microbatches in flight; `strategy="pipeline_parallel"`.

    Raises:
        ConfigError: A size, schedule or split that cannot be.
    """

    stage = 0
    model_axes: ClassVar[tuple[Axis, ...]] = ("pp",)

    @takes(RunConfig, PipelineParallelConfig, GradientConfig)
    def __init__(self, **options: Unpack[PipelineParallelOptions]) -> None:
        pipeline = PipelineParallelConfig.of(options)
        self._set_pipeline(pipeline.pipeline_parallel_size, pipeline)
        super().__init__(**part(SharedOptions, options))

    def _set_pipeline(self, size: int | None, stages: ScheduleConfig) -> None:
        """Take the options of the pipeline."""
        self._pipeline_parallel_size = size
        self._schedule = stages.schedule
        self._num_microbatches = stages.num_microbatches
        self._blocks = stages.blocks
        self._balance = stages.split
        self._partition: Partition | None = None
        self._staged: StagedModel | None = None
        self._stage_split: PipelineSplit | None = None
        self._pipeline: Pipeline | None = None
        self._logs: StepLogs | None = None
        self._num_in_step = 1  # microbatches of the training step that runs
        self._warned_of_bubble = False

    @property
    @override
    def mesh(self) -> ParallelMesh:
        size = self._pipeline_parallel_size
        return ParallelMesh.of_world(self.world_size, pp=self.world_size if size is None else size)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; there from `setup` to `teardown`."""
        if self._pipeline is None:
            raise ConfigError("There is no pipeline before the strategy's setup or after teardown.")
        return self._pipeline

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that has as many samples."""
        return self._num_microbatches or 2 * self.mesh.pp

    @property
    def num_stages(self) -> int:
        """Stages over all ranks of the pipeline."""
        if isinstance(self._balance, list):
            return len(self._balance) + 1
        return self.mesh.pp * default_stages_per_rank(self._schedule)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        return make_schedule(
            self._schedule,
            num_ranks=self.mesh.pp,
            num_microbatches=num_microbatches,
            num_stages=self.num_stages,
        )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if self.mesh.pp > 1:
            self._check_steps()
        super().setup(trainer)

    def _check_steps(self) -> None:
        module = self.lightning_module
        assert module is not None
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

    @override
    def _apply_layer_sync(self) -> None:
        assert self.model is not None
        from_local = self.mesh.pp > 1 and self.num_microbatches > 1
        if from_local and layer_sync(self) is not None and batch_norms(self.model):
            raise ConfigError(
                f"sync_batchnorm=True asks for statistics of the whole batch, but a pipeline runs "
                f"its {self.num_microbatches} microbatches one after the other; expected a batch "
                f"in one part. Set num_microbatches=1, leave sync_batchnorm out (each microbatch "
                f"then has its own statistics), or use strategy='zero3'."
            )
        super()._apply_layer_sync()

    @override
    def model_to_device(self) -> None:
        if self.mesh.pp == 1:  # else once it has been split: no device holds other stages' layers
            super().model_to_device()

    @override
    def _split_model(self) -> ModelSplit | None:
        if self.mesh.pp == 1:
            return None
        assert self.model is not None
        assert self.lightning_module is not None
        model, group = self.model, self.along("pp")
        refuse_leftover_shards(model)
        check_same_model(model, group)
        self._partition = self._stages(model)
        ranks = place_stages(self._schedule, self.mesh.pp, self.num_stages)
        self.schedule(self.num_microbatches)  # refused here, where nothing has been changed
        self._stage_split = PipelineSplit(model, self._partition, ranks, group, self.root_device)
        own = [stage for stage, rank in enumerate(ranks) if rank == group.rank]
        self._staged = StagedModel(
            model, self._partition, self._stage_split.param_stages, self._stage_split.shapes, own
        )
        params = {stage: self._stage_split.stage_params(stage) for stage in own}
        with self._drawn_for_own_data():
            self._pipeline = Pipeline(
                self._staged,
                group,
                params,
                self.schedule,
                ranks,
                self.root_device,
                early=self.backend.matches_tags,
            )
        self._logs = StepLogs(self.lightning_module, group, self._pipeline.last_rank)
        return self._stage_split

    def _stages(self, model: torch.nn.Module) -> Partition:
        assert self.lightning_module is not None
        blocks = find_blocks(model, self._blocks)
        check_calls(model, blocks)
        measured = None
        if self._balance in ("flops", "memory"):
            measured = measured_costs(
                self.lightning_module,
                blocks,
                self._balance,  # type: ignore[arg-type]
                self.along("pp"),
            )
        return self._cut(model, blocks, measured)

    def _cut(
        self, model: torch.nn.Module, blocks: BlockList, measured: BlockCosts | None
    ) -> Partition:
        return partition_blocks(
            model,
            blocks,
            num_stages=self.num_stages,
            split=self._balance,  # type: ignore[arg-type]
            measured=measured,
        )

    @override
    def _finish_copies(self) -> None:
        super()._finish_copies()
        if self._staged is not None:
            self._staged.restore_copies()

    @override
    def described(
        self, module: "pl.LightningModule", precision: str, measure: Measure
    ) -> Description:
        described = super().described(module, precision, measure)
        if self.mesh.pp == 1:
            return described
        measured: BlockCosts | None = None
        if self._balance in ("flops", "memory"):
            measured = measure(find_blocks(module, self._blocks), self._balance)  # type: ignore[arg-type]
        return replace(
            described,
            cut=lambda model: self._cut(model, find_blocks(model, self._blocks), measured),
            stage_ranks=place_stages(self._schedule, self.mesh.pp, self.num_stages),
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
        )

    @override
    def _unsplit_model(self, *, full: bool) -> None:
        if self._logs is not None:
            self._logs.restore()
        if self._staged is not None:
            self._staged.restore()
        if self._stage_split is not None:
            self._stage_split.restore(full=full)
        self._logs = self._staged = self._stage_split = self._pipeline = None

    @override
    def _explain_shards(self, callbacks: Sequence[Callback]) -> None:
        super()._explain_shards(callbacks)
        if self._stage_split is None:
            return
        assert self.lightning_module is not None
        absent = self._stage_split.full_shapes
        params = self.lightning_module.named_parameters()
        names = [name for name, param in params if param in absent]
        self._in_hooks = self._in_hooks or ExitStack()
        around = hooks_inside(lambda: explaining_absent(names), self.lightning_module, callbacks)
        self._in_hooks.enter_context(around)

    def _microbatches(self, batch: Any) -> list[Microbatch]:
        return split_batch(batch, min(self.num_microbatches, batch_size_of(batch)))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline is None:
            return super().training_step(*args, **kwargs)
        pipeline = self._pipeline
        microbatches = self._microbatches(args[0])
        self._num_in_step = len(microbatches)
        self._warn_of_bubble(self._num_in_step)
        step = self._step(self._modules_step("training"), args, kwargs)
        with self.engine.step(), isolate_rng():
            try:
                results, stash = pipeline.train("training", microbatches, step, _loss, self._seed)
            finally:
                self._num_in_step = 1
            assert self._stage_split is not None
            self._stage_split.sum_ties(stash)
        taken = [one for one in microbatches if results.get(one.index) is not None]
        outputs, weight = self._shared(results, taken)
        if outputs is None:  # which Lightning allows on one device only
            return self._without_gradients(stash)
        stash.seed *= weight  # the mean is over the samples that have a loss
        return self._with_gradients(outputs, stash)

    def _without_gradients(self, stash: GradientStash) -> Tensor:
        """Return a loss that leaves every parameter without a gradient: the batch is skipped."""
        stash.clear()
        return stash.hand_over(torch.zeros((), device=self.root_device), self.engine.take_gradient)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the data-parallel ranks; see `ShardStrategy`.

        Raises:
            ConfigError: With `sync_grads` inside a step of which a microbatch is a part only.
        """
        if sync_grads and self._num_in_step > 1:
            raise ConfigError(
                f"training_step gathers tensors with sync_grads=True, for a loss over the samples "
                f"of the whole batch, but a pipeline runs it for each of {self._num_in_step} "
                f"microbatches, which would be compared only within themselves; expected a step of "
                f"the whole batch. Set num_microbatches=1, or use strategy='zero3'."
            )
        return super().all_gather(tensor, group, sync_grads)

    def _with_gradients(self, outputs: Any, stash: GradientStash) -> Any:
        """Connect the loss that the step returns with the gradients that are already there."""
        loss = _loss(outputs)
        if loss is None:
            return outputs
        handed = stash.hand_over(loss, self.engine.take_gradient)
        return {**outputs, "loss": handed} if isinstance(outputs, Mapping) else handed

    @property
    def _seed(self) -> float:
        """What gradients are multiplied with while they travel: the scale of a loss scaler."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _step(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Microbatch, bool], Any]:
        logs = self._logs
        assert logs is not None

        def step(microbatch: Microbatch, is_last: bool) -> Any:
            with logs.recording(microbatch.size, counts=is_last, completed=self._completed):
                return self._completed(run(microbatch.content, *args[1:], **kwargs))

        return step

    def _completed(self, result: Any) -> Any:
        """What the last stage's step has returned, as other ranks can take it."""
        return result

    def _shared(self, results: dict[int, Any], microbatches: list[Microbatch]) -> tuple[Any, float]:
        """Merge what the last stage's steps have returned, and give it to every rank.

        Returns:
            With the microbatches' share of the batch.
        """
        assert self._logs is not None
        outputs, weight = None, sum(one.weight for one in microbatches)
        if self.pipeline.has_last_stage and microbatches:
            sizes = [one.size for one in microbatches]
            outputs = merge_outputs([results[one.index] for one in microbatches], sizes)
        outputs, weight = self._logs.replay((outputs, weight))
        return outputs, float(weight)

    def _evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pipeline, run = self.pipeline, self._modules_step(kind)
        microbatches = self._microbatches(args[0])
        loader = ", ".join(str(one) for one in args[2:])
        with self.engine.step(), isolate_rng():
            step = self._step(run, args, kwargs)
            results = pipeline.evaluate(f"{kind} {loader}", microbatches, step)
        if results is None:  # a step that does not use the network
            return run(*args, **kwargs)
        return self._shared(results, microbatches)[0]

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline is None:
            return super().validation_step(*args, **kwargs)
        return self._evaluate("validation", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline is None:
            return super().test_step(*args, **kwargs)
        return self._evaluate("test", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline is None:
            return super().predict_step(*args, **kwargs)
        return self._evaluate("predict", args, kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._stage_split is not None and self._logs is not None:
            self._stage_split.share_buffers()
            self._logs.share_persistent_metrics()
        return super().lightning_module_state_dict()

    def _warn_of_bubble(self, num_microbatches: int) -> None:
        if num_microbatches < self.num_stages and not self._warned_of_bubble:
            self._warned_of_bubble = True
            ranks = self.mesh.pp
            idle = (ranks - 1) / (num_microbatches + ranks - 1)
            rank_zero_warn(
                f"{num_microbatches} microbatches are fewer than the {self.num_stages} stages: "
                f"expect each rank to be idle for about {idle:.0%} of a step. Set num_microbatches "
                f"to {4 * ranks} or more, with a batch of as many samples."
            )


def _loss(result: Any) -> Tensor | None:
    found = result.get("loss") if isinstance(result, Mapping) else result
    return found if isinstance(found, Tensor) else None
