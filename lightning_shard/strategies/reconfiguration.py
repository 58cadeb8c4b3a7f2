"""What elastic training does at a boundary and when ranks are lost: remember, and reconfigure.

the next generation of members, and its groups
the newest boundary of which somebody has every shard
the engine anew; shards cut anew; loops, callbacks and schedulers as they were; data assigned anew
"""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.common_failure import all_raise
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.rendezvous import unless_a_rank_fails
from lightning_shard.data_parallel.agreement import strangers
from lightning_shard.data_parallel.leftovers import take_leftovers
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.data_assignment import DataAssignment
from lightning_shard.elastic.generation import EvictedError, Generation
from lightning_shard.elastic.loop import Reconfiguration
from lightning_shard.elastic.progress import Progress
from lightning_shard.elastic.recovery import agree, restore
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    RankFailedError,
)
from lightning_shard.launchers._lightning import mark_terminated
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.strategies.elastic_membership import ElasticMembership

_SIGNALS_SECONDS = 1.0  # between the first and the last SIGTERM to the ranks of a job
_POLL_SECONDS = 0.01
_NEWCOMER, _LEAVER = 1, 2  # what ranks tell each other at a boundary
_FINAL = (
    ConfigError,
    MisconfigurationException,
    DeadlockError,
    CollectiveMismatchError,
    EvictedError,
)


class ReconfiguringStrategy(ElasticMembership):
    """Does what the elastic loops ask; see `elastic.loop.Elastic`."""

    keeps_optimizers = True
    _data_assignment: DataAssignment
    _memory: SnapshotMemory
    _snapshot_every: int
    _is_over = False  # whatever comes now ends the fit
    _has_begun = False
    _last_loss: tuple[tuple[str, ...], int] = ((), -1)
    _num_in_vain = 0
    _began = 0.0  # the fit, by the clock of files
    stands_behind_step = False
    _ends_in_common = False  # all ranks stop at the same place, with their groups

    # --- what the loops ask -----------------------------------------------------------------------

    @property
    def is_newcomer(self) -> bool:
        """Whether this process goes on from what others, or its predecessors, remember."""
        has_past = self._restarts is not None and self._restarts.has_past
        return has_past or self.generation.number == 0

    def see_data(self) -> None:
        """When the training loader is there: count batches of a checkpoint as those of now."""
        self._data_assignment.recount_loaded(self._trainer)

    def assigning_batches(self) -> AbstractContextManager[None]:
        """In which the training loader is made."""
        return self._data_assignment.assigning_batches(self._trainer)

    def counting_steps(self) -> AbstractContextManager[None]:
        """In which is due, behind an optimizer step, what was due there for the first ranks."""
        return self._data_assignment.counting_steps(self._trainer)

    def begin(self) -> None:
        """Before the first step: remember it. Does nothing later; each rank must call."""
        if self._has_begun:
            return
        self._has_begun = True
        if self.generation.is_last:  # too few have come
            self._save_and_end(self.generation)
        self._data_assignment.check_alike(self.collectives)
        self._keep(self._progress(behind_step=False))
        self._memory.finish()
        self.membership.begin_step(self._step)

    def reach_boundary(self) -> None:
        """After an optimizer step; each rank must call.

        Raises:
            Reconfiguration: All ranks have agreed that somebody joins or leaves here.
            SIGTERMException: This rank leaves, or all do.
        """
        self._data_assignment.note_step(_lightning.epoch_of_samplers(self._trainer), self._step)
        self._memory.finish()
        if self._step % self._snapshot_every == 0:
            self._remember(behind_step=True)
        elif self._options.stage == 0:
            self._memory.note_live(self._step, self._progress(behind_step=True))
        self.membership.begin_step(self._step)

    def finish(self) -> None:
        """After the last step: make the module whole, while a loss can be survived."""
        self._detach(self.engine)
        self._engine, self._sharded, self._averages = None, [], []

    def survives(self, error: BaseException) -> bool:
        """Whether to reconfigure after this error rather than to end with it."""
        if self._is_over or isinstance(error, _FINAL):
            return False
        return isinstance(error, (Exception, Reconfiguration))

    def reconfigure(self, error: BaseException | None) -> None:
        """Go on in the next generation, from the newest boundary that is complete.

        Args:
            error: What has ended this one; None for an agreed change.

        Raises:
            RankFailedError: Another peer was lost meanwhile, or too few ranks are left.
            Exception: `error` itself: this rank has failed too often, or all have, at one place.
            CheckpointError: Nobody has a part of the state.
        """
        is_own = error is not None and not _is_of_a_peer(error)
        if error is not None and is_own and self.generation.number and all_raise(error):
            self._is_over = self._ends_in_common = True  # no accident: they would raise it again
            raise error
        self._drop_generation()
        try:
            generation = self.membership.following(error if is_own else None)
        except EvictedError as verdict:
            self._is_over = True
            assert error is not None
            error.add_note(str(verdict))
            raise error from None
        except BaseException:
            self._is_over = True
            raise
        was_first = self.is_global_zero
        self._check_gain(generation, error)
        self._init_groups(generation)
        unless_a_rank_fails(self._use_groups, "making the process groups")
        self._take_up()
        self._left_sharded = False
        _lightning.share_places(self._trainer, self.broadcast)
        if self.is_global_zero and not was_first:
            _lightning.continue_logs(self._trainer)
        if generation.is_last:
            self._save_and_end(generation)

    def _check_gain(self, generation: Generation, error: BaseException | None) -> None:
        """Raise the error where the same ranks reconfigure again and again at the same step."""
        here = generation.members, self._step
        in_vain = error is not None and here == self._last_loss
        self._num_in_vain = self._num_in_vain + 1 if in_vain else 0
        self._last_loss = here
        if self._num_in_vain > self._bounds.max_failures:
            self._is_over = True
            assert error is not None
            error.add_note(
                f"The same {generation.size} ranks have reconfigured {self._num_in_vain} times at "
                f"step {self._step}, though none of them was lost."
            )
            raise error

    # --- remembering ------------------------------------------------------------------------------

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _step(self) -> int:
        return self._trainer.global_step

    def _progress(self, *, behind_step: bool) -> Progress:
        return Progress.of(
            self._trainer, self._data_assignment.batch_assignment, behind_step=behind_step
        )

    def _remember(self, *, behind_step: bool) -> None:
        """Take a snapshot, and hear who wants to join or to leave; each rank must call."""
        membership = self.membership
        said = _NEWCOMER * membership.is_wanted | _LEAVER * membership.is_leaving
        heard = self._keep(self._progress(behind_step=behind_step), said)
        if self._restarts is not None:
            self._restarts.forget_past()
        if not heard:
            return
        self._memory.finish()
        if heard & _LEAVER:
            self._let_leave()
        raise Reconfiguration

    def _keep(self, progress: Progress, said: int = 0) -> int:
        heard = self._memory.remember(self.engine, self.optimizers, self._step, progress, said)
        if self._options.stage == 0:
            self._memory.note_live(self._step, progress)
        return heard

    @property
    @override
    def has_shut_down_together(self) -> bool:
        return self._ends_in_common or super().has_shut_down_together

    def _let_leave(self) -> None:
        """Let those go that were asked to; each rank must call."""
        leaving = self._who_leaves()
        if not all(leaving):
            self._memory.hand_over(leaving)
        if not leaving[self.collectives.rank]:
            return
        self._is_over = True
        mark_terminated(self._trainer)
        if all(leaving):  # the scheduler ends the job
            self._ends_in_common = True
            self._save_at_the_end()
        else:
            self._drop_generation()
            self.membership.leave()
        raise SIGTERMException(liveness.TERMINATED_STATUS)

    def _who_leaves(self) -> list[bool]:
        """By rank; who ends a whole job sends its signals one after the other."""
        leaving: list[bool] = self.collectives.all_gather_object(self.membership.is_leaving)
        if all(leaving):
            return leaving
        deadline = time.monotonic() + _SIGNALS_SECONDS
        while not self.is_in_process and not self.membership.is_leaving:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        leaving = self.collectives.all_gather_object(self.membership.is_leaving)
        return leaving

    def _save_at_the_end(self) -> Path:
        """Save the state where all ranks stop; each rank must call."""
        trainer = self._trainer
        path = Path(trainer.default_root_dir) / f"elastic-step={self._step}.ckpt"
        trainer.save_checkpoint(path)
        return path

    # --- reconfiguration
    # -------------------------------------------------------------------------------

    def _drop_generation(self) -> None:
        """Leave the engine and the groups as they are; keep what there is to go on from."""
        if self._engine is not None:
            self._memory.close(self._engine, self.optimizers)
            for sharded in self._sharded:
                sharded.detach()
            self._engine.abandon()
            self._left_sharded = True
        self._engine, self._sharded = None, []
        self._collectives = self._reducing = self._duplicated = None
        self.membership.drop_groups()

    def _take_up(self) -> None:
        """Bring this generation to a boundary; each rank must call."""
        collectives = self.collectives
        plan = agree(collectives, self._memory.held)
        if plan is None:
            self._take_up_checkpoint()
            return
        self._rebuild_engine()
        restored = restore(
            collectives,
            plan,
            self._memory.held,
            self.engine,
            self.optimizers,
            me=self.generation.me,
        )
        own = None if restored.own is None else Progress.unpack(restored.own)
        self._go_on_from(Progress.unpack(restored.extra), own)

    def _rebuild_engine(self) -> None:
        """Make the engine anew, at this generation's size and without values."""
        assert self.model is not None
        self._revert_layer_sync()
        self._apply_layer_sync()
        take_leftovers(self.model)
        self._part_with_strangers()
        self._start_engine()
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._sharded = [ShardedOptimizer(one, self.engine) for one in self.optimizers]
        unless_a_rank_fails(self._enter_memory, "making the group of the snapshots")

    def _part_with_strangers(self) -> None:
        """Go on without newcomers that have another model."""
        assert self.model is not None
        others = strangers(self.model, self.collectives)
        if others and self.collectives.rank not in others:
            raise RankFailedError(
                f"Rank {self.collectives.rank}: the ranks {others} have another model than rank 0, "
                f"and so take no part. Build it from the same arguments everywhere."
            )
        if others:
            raise ConfigError(
                f"Rank {self.collectives.rank}: the model that this process has built is another "
                f"than that which is trained, expected the same. Build it from the same arguments."
            )

    def _enter_memory(self) -> None:
        self._memory.enter(self.generation, self._memory_group(), self._stride)

    def _take_up_checkpoint(self) -> None:
        """Go back to the newest checkpoint, where too many ranks were lost at once."""
        trainer = self._trainer
        is_first = self.is_global_zero
        path = _lightning.newest_checkpoint(trainer, self._began) if is_first else None
        path = self.broadcast(path)
        if path is None:
            self._is_over = True
            raise CheckpointError(
                f"Rank {self.global_rank}: {self.generation.reason}, and with them all copies of a "
                f"part of the state; expected a checkpoint to go back to, but this fit has saved "
                f"none. Add a ModelCheckpoint with every_n_train_steps."
            )
        self._rebuild_engine()
        _lightning.load_checkpoint(trainer, path)
        _lightning.begin_anew(
            trainer, mid_epoch=self._data_assignment.batch_assignment.position.steps > 0
        )
        self._data_assignment.check_alike(self.collectives)
        self._data_assignment.recount_loaded(trainer)
        self.stands_behind_step = False
        self._keep(self._progress(behind_step=False))

    def _go_on_from(self, progress: Progress, own: Progress | None) -> None:
        trainer = self._trainer
        progress.load_buffers(trainer.lightning_module)
        progress.load_trainer(trainer)
        self._data_assignment.take_over(trainer, progress.batch_assignment, self.collectives.size)
        _lightning.begin_anew(trainer, mid_epoch=progress.batch_assignment.position.steps > 0)
        self._data_assignment.check_alike(self.collectives)
        self._data_assignment.recount(trainer, progress.accumulation)
        progress.load_own(trainer, own, self.global_rank)
        self.stands_behind_step = progress.behind_step
        self._keep(self._progress(behind_step=progress.behind_step))

    def _memory_group(self) -> Collectives:
        """The ranks over a group for host memory, whose messages pass while others wait."""
        if self.root_device.type == "cpu" or self.is_in_process:
            return self.collectives.duplicate(self._timeout)
        group = dist.new_group(backend="gloo", timeout=self._timeout)
        return get_backend("gloo").collectives(group)

    @property
    def _stride(self) -> int:
        return self.num_processes if self.num_nodes > 1 else 1

    def _save_and_end(self, generation: Generation) -> None:
        """Save what there is, and end: too few ranks are left."""
        self._is_over = True
        path = self._save_at_the_end()
        raise RankFailedError(
            f"Rank {generation.rank}: {generation.reason or 'too few ranks are left'}, and nobody "
            f"has come for a while. The state after step {self._step} is saved in {path}. Start "
            f"again with ckpt_path={str(path)!r} when there are more ranks."
        )


def _is_of_a_peer(error: BaseException) -> bool:
    return isinstance(error, RankFailedError) or is_about_a_peer(error)
