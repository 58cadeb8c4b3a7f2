"""Replicated data parallel and ZeRO stages 1 to 3 as Lightning strategies: the engine's adapter.

Lightning calls a strategy's hooks. Each says here which parts of the run answer, and in which
order; what the parts do stands in their files, which `run.py` lists.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.registry import collectives_over
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core import settings
from lightning_shard.core.mesh import AXES, Axis, KnownAxis, NodePlacement, ParallelMesh
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.bucket_choice import BucketChoice
from lightning_shard.data_parallel.compression import Compressor, Tally
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.deferred_init.recorder import noting_changes, recording
from lightning_shard.data_parallel.deferred_init.start import move_to, staying_on_meta
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import HeldBytes, held, replicated
from lightning_shard.data_parallel.options import Offload
from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.environments.launchers.in_process import InProcessLauncher
from lightning_shard.errors import ConfigError
from lightning_shard.optim.clipping import global_grad_norm
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.planning.description import Description, Measure
from lightning_shard.planning.dry_run import dry_run
from lightning_shard.precision.plugins import sharded_plugin
from lightning_shard.strategies.dimensions.dimension import ParallelDimension
from lightning_shard.strategies.groups import DataParallelSize
from lightning_shard.strategies.joining import LocalRanks, OnLocalRanks
from lightning_shard.strategies.options import DataParallelOptions, LightningOptions, OptionNames
from lightning_shard.strategies.run import Run
from lightning_shard.strategies.trainer._lightning import accept_compiled_modules
from lightning_shard.strategies.trainer.batch_samplers import merged
from lightning_shard.strategies.trainer.step_collectives import agreed, gathered, reduced

T = TypeVar("T")


class DataParallelStrategy(OnLocalRanks, ParallelStrategy, metaclass=OptionNames):
    """One model on every rank, or shared along dimensions, on parts of the batch.

    Raises:
        ConfigError: An unknown backend, or options that contradict each other.
    """

    stage: int
    dimensions: Sequence[ParallelDimension] = ()  # the first splits the model first
    data_parallel_size: DataParallelSize = -1
    axis_order: Sequence[KnownAxis] = AXES
    is_distributed = True  # tells the Trainer to shard the data over ranks
    meets_at_steps: ClassVar[bool] = True  # whether all ranks begin each step together
    assigns_samples = False  # whether it assigns those of training itself
    may_share_memory = True  # whether CPU ranks of one host do, where no backend is named
    saves_shards: ClassVar[bool] = True  # which stay as they are while a file is written
    may_leave_shards: ClassVar[bool] = True
    keeps_optimizers: ClassVar[bool] = False  # from a fit's beginning to its end
    lays_out_anew: ClassVar[bool] = True  # layers that get another format before the first step
    owns_matrices: ClassVar[bool] = True  # a rank each, for optimizers that need full ones
    cuts_at_blocks: ClassVar[bool] = True  # shards, for optimizers with state in blocks
    dry_run = dry_run

    @takes(DataParallelOptions)
    def __init__(self, options: DataParallelOptions) -> None:
        self.local_ranks = LocalRanks(options, "Trainer", may_share_memory=self.may_share_memory)
        self.checkpoint_format = options.checkpoint_format
        self.save_trainable_only, self.async_save = options.save_trainable_only, options.async_save
        if not self.is_in_process:
            # Lightning's environment converts these when the Trainer is made, and names none.
            settings.check_numbers(settings.SLURM)
        super().__init__(**options.part(LightningOptions))
        self.run = Run(self, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for another rank or Trainer; in a run itself, which is there once."""
        # A progress bar that user code copies in a hook holds its trainer, and that its strategy.
        trainer = self.run.trainer
        is_running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if is_running and (current_world() is not None or not self.is_in_process):
            return self  # before there is a world, ranks are copied
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(deepcopy(self.__getstate__(), memo))
        made._wrap(made.optimizers)
        return made

    def _wrap(self, optimizers: list[Optimizer]) -> None:
        """Have optimizers as Lightning has them; in a copy, whose run may not be whole yet, too."""
        strategy: Any = Strategy
        strategy.optimizers.fset(self, optimizers)

    def __copy__(self) -> Self:
        """Return a copy to ask; what is done to it stays apart from this one's run."""
        made = type(self).__new__(type(self))
        vars(made).update({**vars(self), "run": self.run.of(made)})
        return made

    def in_process(self, num_ranks: int, **changed: Any) -> Self:
        """Return a new strategy of the same options whose ranks run inside this process.

        Args:
            num_ranks: Ranks of the new one.
            **changed: Options that it is to have in the place of this one's.
        """
        return self.with_options(**{"backend": "in_process", "num_ranks": num_ranks, **changed})

    def with_options(self, **changed: Any) -> Self:
        """Return a new strategy of the same options but for those that are changed."""
        args, given = self.given_options  # type: ignore[attr-defined]
        return type(self)(*args, **{**given, **changed})

    # --- ranks ------------------------------------------------------------------------------------

    @property
    def mesh_rank(self) -> int:
        """Number of this rank among all, whichever samples they are given: its place in the mesh.

        `global_rank` and `world_size` count as user code is to: ranks of other samples.
        """
        return super().global_rank

    @property
    def mesh_size(self) -> int:
        """Number of all ranks."""
        return super().world_size

    @property
    def shard_size(self) -> int:
        """How many of the ranks that average gradients share out a copy of the state."""
        return self.run.groups.shard_size

    @property
    @override
    def global_rank(self) -> int:
        """Number of this rank among those that are given other samples."""
        return self.run.groups.place_among_samples()[0] if self.dimensions else self.mesh_rank

    @property
    @override
    def world_size(self) -> int:
        """Number of ranks that are given other samples."""
        return self.run.groups.place_among_samples()[1] if self.dimensions else self.mesh_size

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.mesh_rank == 0

    @property
    def mesh(self) -> ParallelMesh:
        """The grid of this run's ranks."""
        return self.run.groups.mesh

    @property
    def collectives(self) -> Collectives:
        """Collectives over all ranks; there once the environment is set up."""
        return self.run.groups.all_ranks

    @property
    def data_collectives(self) -> Collectives:
        """Ranks of other samples, for loaders, random numbers, metrics and logs."""
        return self.run.groups.samples

    @property
    def gradient_groups(self) -> DataGroups:
        """The ranks whose gradients are averaged, and how they share the state."""
        return self.run.groups.gradients

    def along(self, axis: Axis) -> Collectives:
        """Return collectives over the ranks that share this model along one axis."""
        return self.run.groups.of_models.along[axis]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.run.groups.everybody is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        data = self.data_collectives
        return {"num_replicas": data.size, "rank": data.rank}

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = sharded_plugin(plugin)

    @override
    def _configure_launcher(self) -> None:
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = InProcessLauncher(self.num_processes, merge=merged)
        else:
            self._launcher = self.processes()

    @override
    def forget_groups(self) -> None:
        self.run.groups.forget()

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if self.run.groups.present is None or not isinstance(tensor, Tensor):
            return tensor
        return reduced(tensor, reduce_op, self._over(group))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (or any) say so; Lightning would count model replicas."""
        ranks = self.run.groups.present
        return (
            decision
            if ranks is None
            else agreed(decision, ranks, self.root_device, "min" if all else "max")
        )

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the ranks of other samples unless a group is given; each rank must call.

        Returns:
            Shape (ranks, ...); the tensor itself where nothing has been started.

        Raises:
            ConfigError: The ranks' shapes differ; or inside a step, where a dimension cannot gather
                with `sync_grads`.
        """
        if sync_grads and self.run.same_bits.is_on:
            raise self.run.same_bits.error(
                "all_gather(sync_grads=True) makes a loss of the samples of all ranks, expected "
                "that of a micro-batch. Leave same_bits out."
            )
        for one in self.dimensions:
            one.check_gather(tensor, sync_grads=sync_grads)
        if self.run.groups.present is None:
            return tensor
        return gathered(tensor, self._over(group), sync_grads=sync_grads)

    def _over(self, group: Any) -> Collectives:
        # LightningModule.all_gather passes the default group where its caller names none
        is_default = group is None or group == dist.group.WORLD
        return self.data_collectives if is_default else collectives_over(group, self.backend)

    @override
    def barrier(self, name: str | None = None) -> None:
        if (ranks := self.run.groups.present) is not None:
            ranks.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        ranks = self.run.groups.present
        return obj if ranks is None else ranks.broadcast_object(obj, src=src)

    # --- from the beginning of a run to its end ---------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.run.setup.random_state = torch.get_rng_state()
        self.set_world_ranks()
        self.local_ranks.enter_groups(self)
        self.run.groups.use()
        if self.lightning_module is not None:
            self.run.end.begin_run()  # what rests is woken while no loop has anything of this run
            self.run.loops.begin(self.lightning_module.trainer)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        self.run.setup.set_up(trainer)

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        self.run.setup.check_optimizers()

    @override
    def model_to_device(self) -> None:
        move_to(self.run.model, self.root_device)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make a module's tensors inside; what happens to those on meta is done when a run begins.

        Args:
            empty_init: Whether new tensors are made on meta, so that each rank makes its shards
                when a run begins, with the values of a module that is built on the CPU.
        """
        plugin = self.precision_plugin
        made = plugin.tensor_init_context() if empty_init else super().tensor_init_context()
        with made, recording(to_meta=bool(empty_init), strategy=self):
            yield

    @property
    def engine(self) -> DataParallelEngine:
        """The engine; there from `setup` to `teardown`."""
        if self.run.engine is None:
            raise ConfigError("There is no engine before the strategy's setup or after teardown.")
        return self.run.engine

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        kept: list[Optimizer] = super().optimizers
        return kept

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Take optimizers; in the middle of a fit each rank must, with the same ones.

        Raises:
            ConfigError: They are not the same on all ranks, or cannot be exchanged here.
        """
        self.run.setup.exchange_optimizers(optimizers)
        self._wrap(optimizers)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.run.end.failed = True

    @override
    def teardown(self) -> None:
        run, module = self.run, self.lightning_module
        run.hooks.end_run()
        run.setup.in_hooks.close()  # first: the user's hooks see no engine that is taken off
        run.steps.activations.end()
        run.end.end_run()  # while optimizers and averages still have their shards
        run.setup.end()
        run.end.failed = False
        run.steps.end()
        with run.end.around_teardown():
            run.checkpoints.tear_down()
            run.loops.end()
            with nullcontext() if module is None else staying_on_meta(module):
                run.termination.end(module)
                super().teardown()
        run.setup.end_hiding()
        run.steps.end_comparing()

    # --- steps ------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.steps.train(super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.steps.evaluate("validation", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.steps.evaluate("test", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.steps.evaluate("predict", super().predict_step, args, kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        for one in self.dimensions:
            one.before_backward(closure_loss)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        steps = self.run.steps
        with self.run.setup.ranks_in_step(), steps.bytes.counting(), steps.memory.told("backward"):
            loss = super().backward(*args, **kwargs)
        if self.run.same_bits.is_on:
            self.run.same_bits.end_backward()
        return loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        step = partial(super().optimizer_step, model=model, **kwargs)
        return self.run.steps.update(optimizer, closure, step)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self.run.steps.prepared(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        self.run.steps.compare_batch(batch, dataloader_idx)
        moved = super().batch_to_device(batch, device, dataloader_idx)
        self.run.same_bits.begin_batch()
        return moved

    @override
    def on_predict_start(self) -> None:
        self.predicted = self.run.steps.begin_predicting()

    # --- checkpoints ------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        self.run.checkpoints.begin_training()
        self.run.hooks.begin_training()
        if self.run.same_bits.is_on:
            self.run.same_bits.check_batches()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.meets_at_steps:
            self.run.checkpoints.saves.advance()

    @override
    def on_train_end(self) -> None:
        self.run.checkpoints.end_training()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self.run.checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.run.checkpoints.remove(filepath)

    def finish_save(self) -> None:
        """Wait until the save in flight is complete, if there is one; each rank must call.

        Raises:
            CheckpointError: It has failed on some rank.
        """
        self.run.checkpoints.saves.finish()

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.run.checkpoints.load(checkpoint_path, weights_only)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.run.checkpoints.check_saves()  # first: other ranks may be elsewhere
        if self.run.engine is not None and self.run.engine.has_other_parameters():
            self.run.setup.follow_model()
        for one in self.dimensions:
            one.share_state()
        with self.run.hooks.in_agreement(), self.run.setup.hidden():
            return self.run.checkpoints.module_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self.run.setup.hidden(), noting_changes(self.run.module):
            self.run.checkpoints.load_module(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.run.setup.hidden():
            return self.run.checkpoints.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        with self.run.setup.hidden():
            if self.run.engine is not None:
                self.run.setup.follow_model()  # those of on_fit_start
            if not self.run.checkpoints.load_optimizers(checkpoint):
                super().load_optimizer_state_dict(checkpoint)

    # --- stages -----------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of ranks that have stages; there from `setup` to `teardown`."""
        return self.run.stages.pipeline

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that has as many samples."""
        return self.run.stages.options.num_parts(self.mesh.pp)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks of the pipeline."""
        return self.run.stages.options.num_stages(self.mesh.pp)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        return self.run.stages.options.table(self.mesh.pp, num_microbatches)

    # --- what a run has come to -------------------------------------------------------------------

    def gradient_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """The norm of the averaged gradient over full parameters; each rank must call.

        Args:
            optimizer: Counts its parameters; None counts all of the model's.
            norm_type: p of the p-norm, or infinity.

        Returns:
            Shape (), the same on every rank.
        """
        groups = [] if optimizer is None else optimizer.param_groups
        params = [one for group in groups for one in group["params"]]
        of_all = [param for flat in self.engine.flats for param in flat.params]
        return global_grad_norm(of_all if optimizer is None else params, self.engine, norm_type)

    @property
    def offload(self) -> Offload | None:
        """What a fit has in host memory; None without offload."""
        return self.run.options.offload

    @property
    def offload_traffic(self) -> Traffic:
        """What this rank has copied "down" to host memory and "up", in this run or the last."""
        return self.run.setup.offload_traffic

    @property
    def activation_traffic(self) -> Traffic:
        """What this rank has copied of activations, as `offload_traffic` counts parameters."""
        return self.run.steps.activations.traffic

    def held_bytes(self) -> HeldBytes:
        """Return the bytes that this rank holds now, counted by storage."""
        return held(self.engine, self.optimizers)

    def replicated_bytes(self) -> HeldBytes:
        """Return the bytes of a rank if every rank held everything; each rank must call."""
        return replicated(self.engine, self.optimizers)

    @property
    def bucket_choice(self) -> BucketChoice | None:
        """What `bucket_mb="auto"` has come to in the last fit; None where the size is given."""
        return self.run.setup.bucket_choice

    @property
    def compression(self) -> Compressor | None:
        """The compressor of gradients; None without compression."""
        return self.run.options.compression

    def compression_tally(self) -> Tally:
        """Bytes that this rank has sent in training steps, and what they would be dense.

        All that a step sends counts: see `step_bytes`. Of this run, or after it of the last fit.
        """
        return self.run.steps.bytes.tally

    # --- before it runs ---------------------------------------------------------------------------

    @property
    def held_besides(self) -> list[str]:
        """Names of what each rank of a fit holds besides the bytes that can be known before it."""
        compressor = self.run.options.compression
        compressed = compressor is not None and compressor.keeps
        found = [name for one in self.dimensions for name in one.held_besides]
        return [*["what compression keeps"] * compressed, *found]

    def placement(self, ranks_per_node: int) -> NodePlacement:
        """Say which groups reach over nodes of so many neighbouring ranks, and what is slow."""
        return self.run.groups.placement(ranks_per_node)

    def described(
        self, module: "pl.LightningModule", precision: str, measure: Measure
    ) -> Description:
        """Say what the ranks of a world have and do, for a dry run; nothing is set up.

        Args:
            module: The module to describe, as in `dry_run`.
            precision: Precision string, as for the Trainer.
            measure: Measures the blocks of the module.
        """
        options, dtypes = self.run.options, self.run.setup.dtypes(precision)
        compressor = options.compression
        if compressor is not None and compressor.keeps:  # which asks what values are
            compressor = None
        engine = replace(options, dtypes=dtypes, compression=compressor, offload=None)
        found = Description(
            mesh=self.mesh,
            engine=engine,
            shard_size=self.shard_size,
            dimensions=self.dimensions,
            offload=options.offload,
        )
        checkpointing = checkpointed_blocks(
            module, engine.activation_checkpointing, engine.units, reads_buffers=False
        )
        with checkpointing:  # which what is measured depends on
            for one in reversed(self.dimensions):
                found = one.described(found, module, measure)
        return found


accept_compiled_modules(DataParallelStrategy)


class DDPStrategy(DataParallelStrategy):
    """Everything replicated; gradients are averaged. `strategy="shard_ddp"`."""

    stage = 0


class ZeRO1Strategy(DataParallelStrategy):
    """Optimizer state in shards. `strategy="zero1"`."""

    stage = 1


class ZeRO2Strategy(DataParallelStrategy):
    """Optimizer state and gradients in shards. `strategy="zero2"`."""

    stage = 2


class ZeRO3Strategy(DataParallelStrategy):
    """Parameters, gradients and optimizer state in shards. `strategy="zero3"`, "shard_fsdp"."""

    stage = 3
