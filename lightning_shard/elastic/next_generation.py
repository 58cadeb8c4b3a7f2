"""From the loss of a rank to the next boundary: new groups, the engine anew, the state put back.

    drop the generation ─> ask for the next one ─> its groups ─> the newest boundary of which
      somebody has every shard ─> the engine anew ─> shards moved into it ─> loops, callbacks and
      schedulers as they were there ─> data assigned to the ranks there are

Where nobody has some shard, ranks go back to the newest checkpoint.
"""

import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.backends.rendezvous import unless_a_rank_fails
from lightning_shard.data_parallel.agreement import strangers
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.early_end import EarlyEnd
from lightning_shard.elastic.membership.generation import EvictedError, Generation
from lightning_shard.elastic.progress import Progress, WhatTrains, flags_of
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.elastic.recovery import RecoveryPlan, agree, restore
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.environments.launchers.failures import all_raise
from lightning_shard.errors import CheckpointError, ConfigError, RankFailedError


class NextGeneration:
    """Brings this rank from one generation into the next, as often as there is one.

    Args:
        fit: The fit that goes on.
        memory: What there is to go on from.
        early_end: Told when nothing can go on.
    """

    def __init__(self, fit: ElasticFit, memory: SnapshotMemory, early_end: EarlyEnd) -> None:
        self._fit = fit
        self._memory = memory
        self._early_end = early_end
        self._fit_began = time.time()  # by the clock of files
        self._num_in_vain = 0
        self._last_loss: tuple[tuple[str, ...], int] = ((), -1)

    def enter(self, error: BaseException | None) -> bool:
        """Go on in the next generation, from the newest boundary that is complete.

        Args:
            error: What has ended this one; None for an agreed change.

        Returns:
            Whether the boundary lies behind an optimizer step.

        Raises:
            RankFailedError: Another peer was lost meanwhile, or too few ranks are left.
            Exception: `error` itself: this rank has failed too often, or all have, at one place.
            CheckpointError: Nobody has a part of the state.
        """
        is_own = error is not None and not _is_of_a_peer(error)
        if error is not None and is_own and self._fit.ranks.generation.number and all_raise(error):
            self._early_end.is_certain = self._early_end.is_common = True
            raise error  # no accident: they would raise it again
        self._memory.close()
        self._fit.strategy.drop_generation()
        generation = self._following(error, is_own=is_own)
        was_first = self._fit.ranks.global_rank == 0
        self._check_gain(generation, error)
        self._fit.strategy.join_generation(generation)
        self._fit.hook_values.keeps_flags = is_own
        behind_step = self._take_up(generation)
        _lightning.share_places(self._fit.trainer, self._fit.strategy.broadcast)
        if self._fit.ranks.global_rank == 0 and not was_first:
            _lightning.continue_logs(self._fit.trainer)
        if generation.is_last:
            self._early_end.save_and_end(generation)
        return behind_step

    def _following(self, error: BaseException | None, *, is_own: bool) -> Generation:
        """Wait for the next generation; whatever is raised meanwhile ends the fit."""
        try:
            return self._fit.ranks.membership.following(error if is_own else None)
        except EvictedError as verdict:
            self._early_end.is_certain = True
            assert error is not None
            error.add_note(str(verdict))
            raise error from None
        except BaseException:
            self._early_end.is_certain = True
            raise

    def _check_gain(self, generation: Generation, error: BaseException | None) -> None:
        """Raise the error where the same ranks reconfigure again and again at the same step."""
        here = generation.members, self._fit.trainer.global_step
        in_vain = error is not None and here == self._last_loss
        self._num_in_vain = self._num_in_vain + 1 if in_vain else 0
        self._last_loss = here
        if self._num_in_vain > self._fit.max_failures:
            self._early_end.is_certain = True
            assert error is not None
            error.add_note(
                f"The same {generation.size} ranks have reconfigured {self._num_in_vain} times at "
                f"step {self._fit.trainer.global_step}, though none of them was lost."
            )
            raise error

    def _take_up(self, generation: Generation) -> bool:
        """Bring this generation to a boundary; each rank must call."""
        plan = agree(self._fit.strategy.collectives, self._memory.held)
        if plan is None:
            self._go_back_to_a_checkpoint(generation)
            behind_step = False
        else:
            behind_step = self._go_on_from_snapshots(plan, generation)
        self._memory.remember(behind_step=behind_step)
        return behind_step

    def _go_on_from_snapshots(self, plan: RecoveryPlan, generation: Generation) -> bool:
        strategy, trainer = self._fit.strategy, self._fit.trainer
        first = [one for one in self._memory.held if plan.has(one) and one.metadata.shard == 0]
        told = Progress.unpack(first[0].metadata.extra).what_trains if first else None
        self._rebuild_engine(generation, told, src=plan.holders[0][0])
        restored = restore(
            strategy.collectives,
            plan,
            self._memory.held,
            strategy.engine,
            strategy.optimizers,
            me=generation.me,
        )
        own = None if restored.own is None else Progress.unpack(restored.own)
        progress = Progress.unpack(restored.extra)
        progress.load_module(trainer.lightning_module)
        progress.load_trainer(trainer)
        own_values = None if own is None else own.hook_values
        self._fit.hook_values.load(progress.hook_values, own_values, strategy.collectives)
        self._fit.data_assignment.take_over(progress.batch_assignment, generation.size)
        self._ask_for_data()
        self._fit.hook_values.load_data_again()
        self._fit.data_assignment.recount(progress.accumulation)
        progress.load_own(trainer, own, generation.rank)
        return progress.behind_step

    def _go_back_to_a_checkpoint(self, generation: Generation) -> None:
        """Go back to the newest checkpoint, where too many ranks were lost at once."""
        trainer, path = self._fit.trainer, None
        if generation.rank == 0:
            path = _lightning.newest_checkpoint(trainer, self._fit_began)
        path = self._fit.strategy.broadcast(path)
        if path is None:
            self._early_end.is_certain = True
            raise CheckpointError(
                f"Rank {generation.rank}: {generation.reason}, and with them all copies of a "
                f"part of the state; expected a checkpoint to go back to, but this fit has saved "
                f"none. Add a ModelCheckpoint with every_n_train_steps."
            )
        module, optimizers = trainer.lightning_module, self._fit.strategy.optimizers
        self._rebuild_engine(generation, WhatTrains.of(module, optimizers, flags_of(module)))
        _lightning.load_checkpoint(trainer, path)
        self._ask_for_data()
        self._fit.data_assignment.recount_loaded()

    def _rebuild_engine(
        self, generation: Generation, told: WhatTrains | None, src: int = 0
    ) -> None:
        """Make the engine of what trains by the word of rank `src`; each rank must call."""
        what_trains = self._fit.strategy.broadcast(told, src)
        assert what_trains is not None  # rank `src` knows it
        module = self._fit.trainer.lightning_module
        what_trains.go_back(module, self._fit.strategy.optimizers)
        self._fit.strategy.rebuild_engine()
        unless_a_rank_fails(
            lambda: self._memory.enter(generation), "making the group of the snapshots"
        )

    def _ask_for_data(self) -> None:
        """Have the loaders asked for anew, from the position on; each rank must call."""
        mid_epoch = self._fit.data_assignment.batch_assignment.position.steps > 0
        _lightning.begin_anew(self._fit.trainer, mid_epoch=mid_epoch)
        self._fit.data_assignment.check_alike(self._fit.strategy.collectives)


def refuse_strangers(
    model: nn.Module, collectives: Collectives, settings: Mapping[str, Any]
) -> None:
    """Go on without newcomers that have another model or other settings; each rank must call.

    Raises:
        ConfigError: This rank has another model than rank 0, or other settings.
        RankFailedError: Other ranks have.
    """
    others = strangers(model, collectives, settings)
    if others and collectives.rank not in others:
        raise RankFailedError(
            f"Rank {collectives.rank}: the ranks {others} have another model than rank 0, or other "
            f"settings, and so take no part. Start them with the same arguments everywhere."
        )
    if others:
        raise ConfigError(
            f"Rank {collectives.rank}: the model that this process has built is another than that "
            f"which is trained, or its Trainer, strategy or versions are, expected the same. Start "
            f"it with the same arguments."
        )


def _is_of_a_peer(error: BaseException) -> bool:
    return isinstance(error, RankFailedError) or is_about_a_peer(error)
