"""Elastic training: ranks are lost and join, and training goes on. `strategy="elastic"`.

    step         step         step ✗ a peer is lost     step ...
        boundary     boundary      │                 ▲
           │ remember: a snapshot, │                 │
           ▼ a copy at the buddy   └─> reconfigure ──────┘

The strategy holds an `ElasticRun`, which says what happens at a boundary and after a loss, and
`ElasticRanks`, which know who takes part.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import LBFGS
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.meeting_place import end_service
from lightning_shard.backends.rendezvous import unless_a_rank_fails
from lightning_shard.checkpoint.by_rank import in_memory, own_entry
from lightning_shard.checkpoint.random_state import random_state
from lightning_shard.checkpoint.section import section_of, writable_section
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.memory.leftovers import take_leftovers
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.data_assignment import DataAssignment
from lightning_shard.elastic.hook_values import HookValues
from lightning_shard.elastic.loop import ElasticRun, make_elastic
from lightning_shard.elastic.membership.generation import Generation, Membership, SignalHandler
from lightning_shard.elastic.membership.launcher import ElasticLauncher
from lightning_shard.elastic.membership.ranks import (
    ElasticRanks,
    GroupSetup,
    make_membership,
    restarted_worker,
)
from lightning_shard.elastic.membership.rendezvous_server import JobRules
from lightning_shard.elastic.progress import flags_of, set_flags
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.elastic.recovery import refuse_strangers
from lightning_shard.environments.elastic import elastic_environment
from lightning_shard.environments.launchers.in_process import InProcessLauncher
from lightning_shard.errors import ConfigError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.joining import leave_groups
from lightning_shard.strategies.names import check_interactive
from lightning_shard.strategies.options import ElasticOptions, SharedOptions
from lightning_shard.strategies.trainer._lightning import handle_requeue, handle_sigterm
from lightning_shard.strategies.trainer.predictions import merged
from lightning_shard.strategies.trainer.same_on_ranks import started_with
from lightning_shard.strategies.trainer.termination import TerminationHandler
from lightning_shard.strategies.trainer.weight_averaging import averaging_callbacks


class ElasticStrategy(DataParallelStrategy):
    """Data parallel over ranks that come and go.

    Raises:
        ConfigError: Options that contradict each other.
    """

    assigns_samples = True
    keeps_optimizers = True
    lays_out_anew = False
    owns_matrices = False  # snapshots and resharding go by even shards
    may_share_memory = False  # not proved with ranks that come and go
    may_leave_shards = False  # the ranks of another generation would not know of them

    @takes(ElasticOptions)
    def __init__(self, options: ElasticOptions) -> None:
        self._elastic = options
        check_backend(options.backend)
        self.stage = options.stage
        self._ranks = ElasticRanks()
        self._run: ElasticRun | None = None  # the present fit, or the last one
        self._asks_requeue = self._requeues = False  # this rank, and all by agreement
        super().__init__(**options.part(SharedOptions))

    # --- which ranks there are --------------------------------------------------------------------

    @property
    @override
    def global_rank(self) -> int:
        return self._ranks.global_rank if self._ranks.are_known else super().global_rank

    @property
    @override
    def world_size(self) -> int:
        return self._ranks.world_size if self._ranks.are_known else super().world_size

    @property
    def generation(self) -> Generation:
        """Who takes part now; there once the environment is set up."""
        return self._ranks.generation

    @property
    def membership(self) -> Membership:
        """This rank's part in the job; there once the environment is set up."""
        return self._ranks.membership

    @property
    def _group_setup(self) -> GroupSetup:
        assert self.cluster_environment is not None
        return GroupSetup(
            backend=self.backend,
            device=self.root_device,
            timeout=self._local_ranks.timeout,
            environment=self.cluster_environment,
        )

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = InProcessLauncher(self.num_processes, is_elastic=True, merge=merged)
            return
        self.cluster_environment = elastic_environment(self.cluster_environment)
        if restarted_worker(self.cluster_environment) is not None:
            super()._configure_launcher()
            return
        rules = JobRules(
            initial_size=self.num_processes * self.num_nodes,
            timeout_seconds=self._local_ranks.timeout.total_seconds(),
            **asdict(self._elastic.bounds),
        )
        self._launcher = ElasticLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, rules
        )
        check_interactive(self, self._launcher, self.num_processes)

    @override
    def setup_environment(self) -> None:
        if dist.is_initialized() and not self.is_in_process:
            if ElasticRanks.of_process is None:
                self._leave_static_run()
            else:
                self._ranks = ElasticRanks.of_process
        super().setup_environment()

    def _leave_static_run(self) -> None:
        """End the groups of a run that was not elastic; each rank must call."""
        leave_groups()
        assert self.cluster_environment is not None
        if restarted_worker(self.cluster_environment) is None:
            end_service()  # the rendezvous server has taken its place

    @override
    def _adopt(self) -> None:
        if not self.is_in_process:
            assert self.cluster_environment is not None
            self._ranks.tell(self.cluster_environment)

    @override
    def _join(self) -> None:
        group_setup, bounds = self._group_setup, self._elastic.bounds
        membership = make_membership(bounds, group_setup, in_process=self.is_in_process)
        self._ranks.begin(membership, group_setup)

    @override
    def watch_for_termination(self, trainer: "pl.Trainer") -> None:
        if (world := current_world()) is not None:
            world.termination.ask_to_leave(world.scheduler)
            self._handle_signals(trainer, TerminationHandler(world.termination))
        elif (handler := self._ranks.membership.watch_signals()) is not None:
            self._handle_signals(trainer, handler)
        else:
            super().watch_for_termination(trainer)

    def _handle_signals(self, trainer: "pl.Trainer", handler: SignalHandler) -> None:
        """Have all ranks leave at either signal; SLURM then starts a job anew at its own."""
        process = os.getpid()
        self._asks_requeue = self._requeues = False

        def ask_requeue(signum: int, frame: FrameType | None) -> None:
            if os.getpid() == process:  # no forked child, which is no rank
                self._asks_requeue = True
                handler(signal.SIGTERM, frame)

        handle_sigterm(trainer, handler)
        handle_requeue(trainer, ask_requeue)

    @override
    def salvaging(
        self, error: BaseException, *, is_common: bool, gone: Sequence[int]
    ) -> AbstractContextManager[None]:
        if is_common and self._ends_in_common:
            self._requeues = self.reduce_boolean_decision(self._asks_requeue, all=False)
        return super().salvaging(error, is_common=is_common, gone=gone)

    @override
    def _check_same_settings(self, collectives: Collectives) -> None:
        if self.generation.number <= 1:  # newcomers that are strangers end nobody else
            super()._check_same_settings(collectives)

    @property
    @override
    def requeues(self) -> bool:
        return self._requeues or super().requeues

    @property
    @override
    def saves_on_sigterm(self) -> bool:
        return super().saves_on_sigterm and not self._ends_in_common  # it has saved already

    @property
    def _ends_in_common(self) -> bool:
        return self._run is not None and self._run.early_end.is_common

    @property
    @override
    def has_shut_down_together(self) -> bool:
        return self._ends_in_common or super().has_shut_down_together

    @override
    def leave(self) -> None:
        super().leave()
        self._ranks.leave()

    # --- a fit ------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self._run = run = self._make_run(trainer)
        make_elastic(trainer, run)  # before configure_optimizers, which may ask for the steps
        super().setup(trainer)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        check_trainer(trainer, averaging_callbacks(callbacks, fitting=True))
        run.begin_fit()

    def _make_run(self, trainer: "pl.Trainer") -> ElasticRun:
        rules = self._elastic
        batch_size, scaling = rules.global_batch_size, rules.learning_rate_scaling
        fit = ElasticFit(
            strategy=self,
            trainer=trainer,
            ranks=self._ranks,
            data_assignment=DataAssignment(
                trainer, self.membership.first_size, batch_size, scaling
            ),
            hook_values=HookValues(trainer),
            snapshot_every=rules.snapshot_every,
            max_failures=rules.max_failures,
            timeout=self._local_ranks.timeout,
            buddy_stride=self.num_processes if self.num_nodes > 1 else 1,
        )
        return ElasticRun(fit)

    @property
    @override
    def held_besides(self) -> list[str]:
        return ["snapshots in host memory"]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.run_module.trainer.training:
            assert self._run is not None
            rank = self.data_collectives.rank
            self._run.data_assignment.assign(dataloader, rank, self.world_size)
        return super().process_dataloader(dataloader)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self._run is not None
        batch_idx = self.run_module.trainer.fit_loop.batch_idx
        weight = self._run.data_assignment.weight(batch_idx)
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, *args, **kwargs)

    @override
    def teardown(self) -> None:
        self._ranks.has_failed = self._failed
        if self._run is not None:
            self._run.data_assignment.end()
        super().teardown()
        self._meet_last()  # in groups that this rank leaves now
        self._ranks.end_run()
        if self._run is not None:
            self._run.end_fit()
            self._ranks.end_fit()

    # --- what the run asks, see `Reconfigurable` --------------------------------------------------

    def drop_generation(self) -> None:
        """Leave the engine and the groups as they are, broken or not; not collective."""
        self._saves.discard()
        if self._engine is not None:
            for sharded in self._sharded:
                sharded.detach()
            self._engine.abandon()
            self._left_sharded = True
        self._engine, self._sharded = None, []
        self._collectives = self._reducing = self._duplicated = None
        self._ranks.membership.drop_groups()

    def join_generation(self, generation: Generation) -> None:
        """Make the groups of a generation; each of its members must call."""
        self._ranks.enter(generation, self._group_setup)
        unless_a_rank_fails(self._use_groups, "making the process groups")

    def rebuild_engine(self) -> None:
        """Make the engine at the present generation's size, without values; each rank must call."""
        self._revert_layer_sync()
        self._apply_layer_sync()
        take_leftovers(self.run_model)
        settings = started_with(self, self.run_module.trainer)
        for name in ("accumulate_grad_batches", "num_sanity_val_steps"):  # a newcomer has others
            settings.pop(f"Trainer({name})")
        refuse_strangers(self.run_model, self.collectives, settings)
        self._buckets.share(self, self._options)
        self._start_engine()
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._sharded = [ShardedOptimizer(one, self.engine) for one in self.optimizers]
        self._left_sharded = False

    def end_training(self) -> None:
        """Make the module full again after the last step; each rank must call."""
        self._detach(self.engine)
        self._engine, self._sharded, self._averages = None, [], []

    # --- checkpoints ------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self._run is not None and "optimizer_states" in checkpoint:
            state = self._run.data_assignment.state()
            state["trains"] = flags_of(self.run_module)
            writable_section(checkpoint)["elastic"] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def kept_besides(self) -> Mapping[str, Any]:
        return {**super().kept_besides(), "random": random_state(self.root_device)}

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        section = section_of(checkpoint)
        if self._run is not None:
            own = own_entry(section, self.mesh, self.global_rank)
            self._run.random = in_memory(own.get("random"))
        kept = section.get("elastic")
        if kept is not None:
            assert self._run is not None
            self._run.data_assignment.load_state(kept, checkpoint["global_step"])
            if self._run.has_begun:  # it goes back within the fit; a new one freezes by itself
                set_flags(self.run_module, kept.get("trains", {}))
            # configure_optimizers may have asked for the data
            _lightning.forget_data(self.run_module.trainer)


def check_backend(backend: str) -> None:
    """Refuse a backend whose ranks cannot outlive each other.

    Raises:
        ConfigError: The backend is MPI, whose launchers end all ranks with one; or shared memory,
            which has not been tried with ranks that come and go.
    """
    if backend == "shm":
        raise ConfigError(
            "The backend 'shm' cannot be elastic: its ranks share one host, and it has not been "
            "proved with ranks that come and go. Use backend='gloo'."
        )
    if backend == "mpi":
        raise ConfigError(
            "The backend 'mpi' cannot be elastic: when a rank dies, its launchers end the others. "
            "Use backend='gloo' or 'nccl', started by the Trainer, srun --no-kill or torchrun."
        )


def check_trainer(trainer: "pl.Trainer", averaging: Sequence[Callback]) -> None:
    """Check what is to be trained, and how.

    Raises:
        ConfigError: It cannot be trained elastically.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes manually, but elastic training changes over how "
            f"many batches gradients are accumulated when ranks come or go. Set "
            f"automatic_optimization=True, or use another strategy."
        )
    if averaging:
        names = ", ".join(type(one).__name__ for one in averaging)
        raise ConfigError(
            f"The callback {names} keeps averages that are lost with a "
            f"rank; expected none in elastic training. Average afterwards, over checkpoints."
        )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS changes the weights several times in a step, so that after a loss it is not "
                "known where it was; expected one update in a step. Use another optimizer, or "
                "strategy='shard_ddp'."
            )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            raise ConfigError(
                f"{type(callback).__name__} unfreezes parameters during the training, which "
                f"newcomers would not know of; expected the same ones to train throughout. Fit "
                f"once for each stage, from the checkpoint of the one before."
            )
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(
                "The learning-rate finder goes back to the weights it began with, which elastic "
                "training takes for those of another job; expected a fit without it. Find the rate "
                "under strategy='zero2', or whichever the scheme is, first."
            )
        if isinstance(callback, GradientAccumulationScheduler) and len(callback.scheduling) > 1:
            raise ConfigError(
                "GradientAccumulationScheduler and elastic training would both set how many "
                "batches are accumulated. Leave the callback out; see global_batch_size."
            )
