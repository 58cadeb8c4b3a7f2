"""The base of this package's strategies: backend, ranks, processes, small collectives."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import RanksTermination
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.core import settings
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.deferred_init.recorder import recording
from lightning_shard.data_parallel.deferred_init.start import move_to, staying_on_meta
from lightning_shard.environments.launchers.in_process import InProcessLauncher
from lightning_shard.environments.launchers.processes import ProcessLauncher
from lightning_shard.errors import ConfigError
from lightning_shard.precision.plugins import sharded_plugin
from lightning_shard.precision.policy import TRUE_DTYPES, AskedFormats
from lightning_shard.strategies.dimensions.dimension import RunGroups
from lightning_shard.strategies.joining import LocalRanks, OnLocalRanks
from lightning_shard.strategies.names import check_interactive
from lightning_shard.strategies.options import LightningOptions, OptionNames, RunOptions
from lightning_shard.strategies.trainer import termination
from lightning_shard.strategies.trainer._lightning import (
    accept_compiled_modules,
    before_batches,
    before_training_ends,
    layer_sync,
    without_sigterm_broadcast,
)
from lightning_shard.strategies.trainer.batch_samplers import assigns_batch_samplers
from lightning_shard.strategies.trainer.layer_sync import layer_sync_over
from lightning_shard.strategies.trainer.predictions import merged
from lightning_shard.strategies.trainer.same_on_ranks import (
    SettingsOfSteps,
    check_same_settings,
    common_seed,
)
from lightning_shard.strategies.trainer.shared_values import common_values
from lightning_shard.strategies.trainer.step_collectives import gathered, reduce_op_name, reduced

T = TypeVar("T")
_GROUPS = (Collectives, DataGroups, RunGroups, dist.ProcessGroup)
_OWN_KINDS = (*_GROUPS, Lifeline, RanksTermination, SettingsOfSteps)


class ShardStrategy(OnLocalRanks, ParallelStrategy, metaclass=OptionNames):
    """Starts the ranks, makes the process group, and answers Lightning's questions about them.

    Raises:
        ConfigError: An unknown backend, or options that contradict each other.
    """

    meets_at_steps: ClassVar[bool] = True  # whether all ranks begin each step together
    assigns_samples = False  # whether it assigns those of training itself
    may_share_memory = True  # whether CPU ranks of one host do, where no backend is named
    _lifeline: Lifeline | RanksTermination | None = None

    @takes(RunOptions)
    def __init__(self, options: RunOptions) -> None:
        self._local_ranks = LocalRanks(options, "Trainer", may_share_memory=self.may_share_memory)
        self._announces = options.announce
        self.checkpoint_format = options.checkpoint_format
        self.save_trainable_only = options.save_trainable_only
        self._save_on_sigterm = options.save_on_sigterm
        self.async_save = options.async_save
        self._reducing: DataGroups | None = None  # for gradients
        self._duplicated: dist.ProcessGroup | None = (
            None  # the default group that it was made beside
        )
        self._random_state: torch.Tensor | None = None  # of the generator, when ranks have started
        self._seed: int | None = None  # rank 0's, where others have another
        self._synced: LayerSync | None = None  # who has exchanged the model's batch norms
        self._last_meeting: Collectives | None = None  # where all ranks end in common
        self._in_run = ExitStack()  # what is put into the trainer of a run
        self._asked_formats = AskedFormats()
        if not self.is_in_process:
            # Lightning's environment converts these when the Trainer is made, and names none.
            settings.check_numbers(settings.SLURM)
        super().__init__(**options.part(LightningOptions))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: its groups, and who watches over them."""
        return {
            name: None if isinstance(value, _OWN_KINDS) else value
            for name, value in super().__getstate__().items()
        }

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

    @property
    def saves_on_sigterm(self) -> bool:
        """Whether a fit that SIGTERM ends is saved though no callback does so."""
        return self._save_on_sigterm and not self.requeues

    @property
    def is_distributed(self) -> bool:
        """Tells the Trainer to shard the data over ranks."""
        return True

    @property
    def run_module(self) -> "pl.LightningModule":
        """The user's module; there from the beginning of a run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def run_model(self) -> nn.Module:
        """What the strategy trains of it; there from the set-up of a run."""
        assert self.model is not None
        return self.model

    @property
    def mesh_rank(self) -> int:
        """Number of this rank among all, whichever samples they are given: its place in the mesh.

        `global_rank` and `world_size` count as user code is to: ranks of other samples. Here these
        are all.
        """
        return self.global_rank

    @property
    def mesh_size(self) -> int:
        """Number of all ranks."""
        return self.world_size

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.mesh_rank == 0

    @property
    def collectives(self) -> Collectives:
        """Collectives over all ranks; there once the environment is set up."""
        if self._collectives is None:
            raise ConfigError("There are no collectives before trainer.fit (or validate ...) runs.")
        return self._collectives

    @property
    def data_collectives(self) -> Collectives:
        """Collectives over the ranks that are given different samples: here, all.

        Loaders, random numbers, metrics and what is logged or gathered follow these.
        """
        return self.collectives

    @property
    def gradient_groups(self) -> DataGroups:
        """The ranks whose gradients are averaged, and how they share out the state: here, all.

        Those of other samples are among them, and those that compute other parts of one sample.
        """
        return DataGroups.of(self.collectives)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = sharded_plugin(plugin)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._collectives is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        data = self.data_collectives
        return {"num_replicas": data.size, "rank": data.rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = InProcessLauncher(self.num_processes, merge=merged)
        else:
            self._launcher = ProcessLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
            check_interactive(self, self._launcher, self.num_processes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self._random_state = torch.get_rng_state()
        self.set_world_ranks()
        self._enter_groups()
        self._use_groups()
        if self.lightning_module is not None:
            self._begin_run(self.lightning_module.trainer)

    def _begin_run(self, trainer: "pl.Trainer") -> None:
        self.watch_for_termination(trainer)
        self._in_run.close()
        self._asked_formats.end()
        if str(self.precision_plugin.precision) in TRUE_DTYPES:
            self._asked_formats.begin()  # until the module is converted
        self._in_run.enter_context(
            assigns_batch_samplers(
                trainer,
                lambda: self.distributed_sampler_kwargs,
                self.broadcast,
                training=not self.assigns_samples,
                predictions=self.is_in_process,
            )
        )

        if self.agrees_on_shutdown:
            self._in_run.enter_context(without_sigterm_broadcast(trainer))
        self._in_run.enter_context(before_batches(trainer, partial(self._begin_batch, trainer)))
        self._in_run.enter_context(common_values(trainer, self))
        self._in_run.enter_context(before_training_ends(trainer, self._end_steps))

    def watch_for_termination(self, trainer: "pl.Trainer") -> None:
        """Handle signals for this run; call before Lightning registers its handlers."""
        self._lifeline = termination.watch(trainer)

    @property
    def agrees_on_shutdown(self) -> bool:
        """Whether ranks learn of a signal to any of them beside the data, at no cost for a step."""
        return self._lifeline is not None

    @property
    def has_shut_down_together(self) -> bool:
        """Whether all ranks have stopped at the same place of the run, by agreement."""
        return self._lifeline is not None and self._lifeline.stops

    @property
    def requeues(self) -> bool:
        """Whether they have stopped because SLURM will start the job again."""
        return self._lifeline is not None and self._lifeline.requeues

    def begin_step(self) -> None:
        """Begin a step, or end the run before it on all ranks, see `termination.begin_step`."""
        module = self.lightning_module
        trainer = None if module is None else module.trainer
        termination.begin_step(self._lifeline, trainer, self.cluster_environment)

    def _begin_batch(self, trainer: "pl.Trainer") -> None:
        self.begin_step()
        self.compare_settings(trainer)

    def compare_settings(self, trainer: "pl.Trainer") -> None:
        """Compare, at some steps, what hooks and schedulers change; a replay leaves it out."""
        if self.meets_at_steps:
            self._settings.before_step(trainer)

    def check_settings(self, trainer: "pl.Trainer") -> None:
        """Compare, around an epoch's end, what hooks and schedulers may change in a fit."""
        self._settings.are_due = True
        if trainer.state.fn == TrainerFn.FITTING and not self.meets_at_steps:
            self._settings.check(trainer)

    def _end_steps(self) -> None:
        """After the last step of a fit, before the hooks `on_train_end`."""
        self.begin_step()
        if self.meets_at_steps and self.lightning_module is not None:
            self._settings.check(self.lightning_module.trainer)

    @override
    def teardown(self) -> None:
        self._asked_formats.end()
        self._in_run.close()
        module = self.lightning_module
        with nullcontext() if module is None else staying_on_meta(module):
            termination.end_watching(module)
            self._lifeline = None
            super().teardown()

    def _use_groups(self) -> None:
        """Talk over the default group there is; each rank must call."""
        group = dist.group.WORLD
        assert group is not None
        self._collectives = self.backend.collectives(group)
        self._settings = SettingsOfSteps(self._collectives, "" if self.meets_at_steps else "lr ")
        self._check_same_settings(self._collectives)
        if self._duplicated is not group:
            self._make_groups()
            self._duplicated = group

    def _check_same_settings(self, collectives: Collectives) -> None:
        """Compare what ranks were started with, before groups are made that depend on it."""
        module = self.lightning_module
        check_same_settings(self, collectives, None if module is None else module.trainer)
        self._seed = common_seed(collectives)

    def _make_groups(self) -> None:
        """Make the groups beside the default one, once for each default group."""
        self._reducing = self.gradient_groups.duplicate(self._local_ranks.timeout)

    @override
    def forget_groups(self) -> None:
        self._collectives = self._reducing = self._duplicated = None

    @override
    def leave(self) -> None:
        self.forget_groups()
        super().leave()

    def salvaging(
        self, error: BaseException, *, is_common: bool, gone: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Make the context in which callbacks hear of an exception and may save checkpoints.

        Args:
            error: Exception that this rank has raised.
            is_common: Whether all ranks have raised at the same place, and enter this, too.
            gone: Ranks that have died.
        """
        del error, is_common, gone
        return nullcontext()

    def end_in_common(self) -> None:
        """Tear the run down after an exception that all ranks have raised at the same place.

        The model is then full where it can be made so; each rank must call.
        """
        self._last_meeting = self._collectives
        try:
            self.teardown()
            self._meet_last()
        finally:
            self._last_meeting = None

    def _meet_last(self) -> None:
        """Where all end in common, wait for the others: a rank that raises ends their waits."""
        meeting, self._last_meeting = self._last_meeting, None
        if meeting is not None:
            meeting.barrier()

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
        with made, recording(to_meta=bool(empty_init), root=lambda: self.lightning_module):
            yield

    @override
    def model_to_device(self) -> None:
        move_to(self.run_model, self.root_device)

    def _apply_layer_sync(self) -> None:
        """Let batch norms know all batches of a step, where the user has asked for it."""
        data = self.gradient_groups.dp  # what ranks compute of one sample counts together
        self._synced = layer_sync_over(data, layer_sync(self), self.root_device, self.mesh_size)
        if self._synced is not None:
            self.model = self._synced.apply(self.run_model)

    def _revert_layer_sync(self) -> None:
        """Exchange synchronised batch norms for those of the user's module."""
        if self._synced is not None and self.model is not None:
            self.model = self._synced.revert(self.model)
        self._synced = None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        ready = self._collectives is not None and dist.is_initialized()
        if self._collectives is None or not ready or not isinstance(tensor, Tensor):
            return tensor
        collectives = self.data_collectives if group is None else self.backend.collectives(group)
        return reduced(tensor, reduce_op_name(reduce_op), collectives)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (or any) say so; Lightning would count model replicas."""
        if self._collectives is None or not dist.is_initialized():
            return decision
        flag = torch.tensor(int(decision), device=self.root_device)
        self._collectives.all_reduce(flag, "min" if all else "max").wait()
        return bool(flag)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel ranks unless a group is given; each rank must call.

        Returns:
            Shape (ranks, ...); the tensor itself where nothing has been started.

        Raises:
            ConfigError: The ranks' shapes differ.
        """
        if self._collectives is None or not dist.is_initialized():
            return tensor
        # LightningModule.all_gather passes the default group where its caller names none
        is_default = group is None or group == dist.group.WORLD
        collectives = self.data_collectives if is_default else self.backend.collectives(group)
        return gathered(tensor, collectives, sync_grads=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._collectives is not None and dist.is_initialized():
            self._collectives.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._collectives is None or not dist.is_initialized():
            return obj
        return self._collectives.broadcast_object(obj, src=src)


accept_compiled_modules(ShardStrategy)
