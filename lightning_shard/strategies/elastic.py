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
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
)
from torch import Tensor
from torch.optim import LBFGS
from typing_extensions import override

from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.liveness.job_server import end_service
from lightning_shard.backends.liveness.thread import Terminable
from lightning_shard.backends.rendezvous import unless_a_rank_fails
from lightning_shard.checkpoint.by_rank import in_memory, own_entry
from lightning_shard.checkpoint.random_state import random_state
from lightning_shard.checkpoint.section import section_of
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.memory.leftovers import take_leftovers
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.data_assignment import DataAssignment
from lightning_shard.elastic.hook_values import HookValues
from lightning_shard.elastic.loop import ElasticRun, make_elastic
from lightning_shard.elastic.membership.generation import Generation, GroupSetup, Membership
from lightning_shard.elastic.membership.launcher import ElasticLauncher
from lightning_shard.elastic.membership.ranks import (
    ElasticRanks,
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
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.joining import LocalRanks, leave_groups
from lightning_shard.strategies.options import ElasticOptions, SharedOptions
from lightning_shard.strategies.parts import SchemeHooks
from lightning_shard.strategies.trainer._lightning import handle_requeue, handle_sigterm
from lightning_shard.strategies.trainer.batch_samplers import merged
from lightning_shard.strategies.trainer.callbacks import averaging_callbacks
from lightning_shard.strategies.trainer.same_on_ranks import started_with
from lightning_shard.strategies.trainer.termination import RunTermination, TerminationHandler


class ElasticLocalRanks(LocalRanks):
    """Joins the ranks of a job that others may leave and join."""

    def __init__(self, options: ElasticOptions) -> None:
        super().__init__(options, "Trainer", may_share_memory=False)
        self.of_job = ElasticRanks()
        self._bounds = options.bounds

    def group_setup(self, strategy: Any) -> GroupSetup:
        """Return what groups of a generation are made with."""
        return GroupSetup(strategy.backend, strategy.root_device, self.timeout)

    @override
    def adopt(self, strategy: Any) -> None:
        if not self.are_in_process:
            self.of_job.tell(strategy.cluster_environment)

    @override
    def join(self, strategy: Any) -> None:
        setup, environment = self.group_setup(strategy), strategy.cluster_environment
        in_process = self.are_in_process
        membership = make_membership(self._bounds, setup, environment, in_process=in_process)
        self.of_job.begin(membership, setup, environment)


class ElasticTermination(RunTermination):
    """Has all ranks leave at either signal; SLURM then starts a job anew at its own."""

    def __init__(self, strategy: "ElasticStrategy", *, saves: bool) -> None:
        super().__init__(saves=saves)
        self._strategy = strategy
        self._asks_requeue = self._requeues = False  # this rank, and all by agreement

    @property
    def _ends_in_common(self) -> bool:
        run = self._strategy.elastic_run
        return run is not None and run.early_end.is_common

    @property
    @override
    def has_stopped_all(self) -> bool:
        return self._ends_in_common or super().has_stopped_all

    @property
    @override
    def requeues(self) -> bool:
        return self._requeues or super().requeues

    @property
    @override
    def saves_on_sigterm(self) -> bool:
        return super().saves_on_sigterm and not self._ends_in_common  # it has saved already

    @override
    def settle(self, strategy: Any) -> None:
        if self._ends_in_common:
            self._requeues = strategy.reduce_boolean_decision(self._asks_requeue, all=False)

    @override
    def watch(self, trainer: "pl.Trainer") -> None:
        if (world := current_world()) is not None:
            world.termination.ask_to_leave(world.scheduler)
            self._handle(trainer, world.termination)
        elif (told := self._strategy.membership.watch_signals()) is not None:
            self._handle(trainer, told)
        else:
            super().watch(trainer)

    def _handle(self, trainer: "pl.Trainer", told: Terminable) -> None:
        process, handler = os.getpid(), TerminationHandler(told)
        self._asks_requeue = self._requeues = False

        def ask_requeue(signum: int, frame: FrameType | None) -> None:
            if os.getpid() == process:  # no forked child, which is no rank
                self._asks_requeue = True
                handler(signal.SIGTERM, frame)

        handle_sigterm(trainer, handler)
        handle_requeue(trainer, ask_requeue)


class ElasticHooks(SchemeHooks):
    """Makes each fit elastic, compares only what began together, keeps how samples are assigned."""

    def __init__(self, run: Any, rules: ElasticOptions) -> None:
        super().__init__(run)
        self._rules = rules

    @override
    def begin_run(self, trainer: "pl.Trainer") -> None:
        self.strategy.elastic_run = run = ElasticRun(self._fit(trainer))
        make_elastic(trainer, run)  # before configure_optimizers, which may ask for the steps

    def _fit(self, trainer: "pl.Trainer") -> ElasticFit:
        rules, strategy, ranks = self._rules, self.strategy, self.strategy.local_ranks
        batch_size, scaling = rules.global_batch_size, rules.learning_rate_scaling
        first_size = strategy.membership.first_size
        return ElasticFit(
            strategy=strategy,
            trainer=trainer,
            ranks=ranks.of_job,
            data_assignment=DataAssignment(
                trainer, first_size, batch_size, scaling, in_order=rules.same_bits
            ),
            hook_values=HookValues(trainer),
            snapshot_every=rules.snapshot_every,
            max_failures=rules.max_failures,
            timeout=ranks.timeout,
            buddy_stride=strategy.num_processes if strategy.num_nodes > 1 else 1,
        )

    @override
    def begin_fit(self, trainer: "pl.Trainer") -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        check_trainer(trainer, averaging_callbacks(callbacks, fitting=True))
        self.strategy.elastic_run.begin_fit()

    @override
    def num_micro_batches(self) -> int:
        found: int = self.strategy.elastic_run.data_assignment.num_micro_batches
        return found

    @override
    def compares_start(self) -> bool:
        return bool(
            self.strategy.generation.number <= 1
        )  # newcomers that are strangers end nobody else

    @override
    def kept_besides(self) -> Mapping[str, Any]:
        return {"random": random_state(self.strategy.root_device)}

    @override
    def section(self) -> Mapping[str, Any]:
        run = self.strategy.elastic_run
        if run is None:
            return {}
        return {"elastic": {**run.data_assignment.state(), "trains": flags_of(self.run.module)}}


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
    local_ranks: ElasticLocalRanks

    @takes(ElasticOptions)
    def __init__(self, options: ElasticOptions) -> None:
        self._elastic = options
        check_backend(options.backend)
        self.stage = options.stage
        self.elastic_run: ElasticRun | None = None  # the present fit, or the last one
        super().__init__(**options.part(SharedOptions))
        self.local_ranks = ElasticLocalRanks(options)
        self.run.termination = ElasticTermination(self, saves=options.save_on_sigterm)
        self.run.hooks = ElasticHooks(self.run, options)

    # --- which ranks there are --------------------------------------------------------------------

    @property
    @override
    def mesh_rank(self) -> int:
        known = self.local_ranks.of_job
        return known.global_rank if known.are_known else super().mesh_rank

    @property
    @override
    def mesh_size(self) -> int:
        known = self.local_ranks.of_job
        return known.world_size if known.are_known else super().mesh_size

    @property
    def generation(self) -> Generation:
        """Who takes part now; there once the environment is set up."""
        return self.local_ranks.of_job.generation

    @property
    def membership(self) -> Membership:
        """This rank's part in the job; there once the environment is set up."""
        return self.local_ranks.of_job.membership

    @override
    def _configure_launcher(self) -> None:
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = InProcessLauncher(self.num_processes, is_elastic=True, merge=merged)
            return
        assert self.cluster_environment is not None
        self.cluster_environment = elastic_environment(self.cluster_environment)
        if restarted_worker(self.cluster_environment) is not None:
            super()._configure_launcher()
            return
        rules = JobRules(
            initial_size=self.num_processes * self.num_nodes,
            timeout_seconds=self.local_ranks.timeout.total_seconds(),
            **asdict(self._elastic.bounds),
        )
        self._launcher = self.processes(partial(ElasticLauncher, rules=rules))

    @override
    def setup_environment(self) -> None:
        if dist.is_initialized() and not self.is_in_process:
            if ElasticRanks.of_process is None:  # a run that was not elastic
                leave_groups()
                assert self.cluster_environment is not None
                if restarted_worker(self.cluster_environment) is None:
                    end_service()  # the rendezvous server has taken its place
            else:
                self.local_ranks.of_job = ElasticRanks.of_process
        super().setup_environment()

    @override
    def leave(self) -> None:
        super().leave()
        self.local_ranks.of_job.leave()

    # --- a fit ------------------------------------------------------------------------------------

    @property
    @override
    def held_besides(self) -> list[str]:
        return ["snapshots in host memory"]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.run.module.trainer.training:
            assert self.elastic_run is not None
            rank = self.data_collectives.rank
            self.elastic_run.data_assignment.assign(dataloader, rank, self.world_size)
        return super().process_dataloader(dataloader)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.elastic_run is not None
        batch_idx = self.run.module.trainer.fit_loop.batch_idx
        weight = self.elastic_run.data_assignment.weight(batch_idx)
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, *args, **kwargs)

    @override
    def teardown(self) -> None:
        ranks, run = self.local_ranks.of_job, self.elastic_run
        ranks.has_failed = self.run.end.failed
        if run is not None:
            run.data_assignment.end()
        super().teardown()
        self.run.meet_last()  # in groups that this rank leaves now
        ranks.end_run()
        if run is not None:
            run.end_fit()
            ranks.end_fit()

    # --- what the run asks, see `Reconfigurable` --------------------------------------------------

    def drop_generation(self) -> None:
        """Leave the engine and the groups as they are, broken or not; not collective."""
        run = self.run
        run.checkpoints.saves.discard()
        if run.engine is not None:
            for sharded in run.setup.sharded:
                sharded.detach()
            run.engine.abandon()
            run.checkpoints.left_sharded = True
        run.engine, run.setup.sharded = None, []
        run.groups.forget()
        self.membership.drop_groups()

    def join_generation(self, generation: Generation) -> None:
        """Make the groups of a generation; each of its members must call."""
        ranks, setup = self.local_ranks.of_job, self.local_ranks.group_setup(self)
        assert self.cluster_environment is not None
        ranks.enter(generation, setup, self.cluster_environment)
        unless_a_rank_fails(self.run.groups.use, "making the process groups")

    def rebuild_engine(self) -> None:
        """Make the engine at the present generation's size, without values; each rank must call."""
        run = self.run
        run.setup.revert_layer_sync()
        run.setup.apply_layer_sync()
        take_leftovers(run.model)
        settings = started_with(self, run.module.trainer)
        for name in ("accumulate_grad_batches", "num_sanity_val_steps"):  # a newcomer has others
            settings.pop(f"Trainer({name})")
        refuse_strangers(run.model, self.collectives, settings)
        run.setup.share_bucket_choice()
        run.setup.start_engine()
        for optimizer in self.optimizers:
            optimizer.state.clear()
        run.setup.renew_optimizers()
        run.checkpoints.left_sharded = False

    def end_training(self) -> None:
        """Make the module full again after the last step; each rank must call."""
        run = self.run
        run.end.detach(self.engine)
        run.engine, run.setup.sharded, run.setup.averages = None, [], []

    # --- checkpoints ------------------------------------------------------------------------------

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        section, run = section_of(checkpoint), self.elastic_run
        if run is not None:
            own = own_entry(section, self.mesh, self.global_rank)
            run.random = in_memory(own.get("random"))
        kept = section.get("elastic")
        if kept is not None:
            assert run is not None
            run.data_assignment.load_state(kept, checkpoint["global_step"])
            if run.has_begun:  # it goes back within the fit; a new one freezes by itself
                set_flags(self.run.module, kept.get("trains", {}))
            # configure_optimizers may have asked for the data
            _lightning.forget_data(self.run.module.trainer)


def check_backend(backend: str) -> None:
    """Refuse MPI, whose launchers end all ranks with one, and shared memory, which is untried."""
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
    """Refuse what cannot be trained elastically."""
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
        if isinstance(callback, (BaseFinetuning, ModelPruning)):
            raise ConfigError(
                f"{type(callback).__name__} unfreezes or prunes parameters during the training, "
                f"which newcomers would not know of; expected the same ones to train throughout. "
                f"Fit once for each stage, from the checkpoint of the one before."
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
