"""An elastic fit: what the loops ask at each boundary, and what happens when a rank is lost.

    loop.py asks             ElasticRun
    begin, reach_boundary ──────> │ ──> SnapshotMemory    a snapshot, a copy at the buddy
                                  │ ──> EarlyEnd          who is asked to leave leaves; save and end
    survives? reconfigure ──────> │ ──> NextGeneration    after a loss, a join, a departure
                                  v
         the strategy, as `Reconfigurable` says: engine and groups are dropped and made anew

What happens after a rank is lost:

    step ✗   a peer dies, or raises an error of its own; whoever waits for it gets RankFailedError
             (a bad option, a mistake that all ranks make, a fit that is over: the error ends it)
    drop     what the buddies have sent is kept; engine and groups are left as they are
    meet     the membership says who takes part: survivors by seniority, then newcomers
    restore  the newest boundary of which somebody has every shard; else the newest checkpoint
    go on    data is assigned to the ranks there are, and the loop goes on behind that boundary

Who says which ranks there are: `ranks`. Heartbeats: `heartbeats`. Who holds the elastic sampler:
`DataAssignment`, which puts it into the training loader.
"""

from contextlib import AbstractContextManager
from datetime import timedelta

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.elastic import _lightning
from lightning_shard.elastic.data_assignment import DataAssignment
from lightning_shard.elastic.early_end import EarlyEnd
from lightning_shard.elastic.generation import EvictedError
from lightning_shard.elastic.next_generation import NextGeneration
from lightning_shard.elastic.ranks import ElasticRanks
from lightning_shard.elastic.reconfigurable import Reconfigurable
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.errors import CollectiveMismatchError, ConfigError, DeadlockError

_NEWCOMER, _LEAVER = 1, 2  # what ranks tell each other at a boundary
_FINAL = (
    ConfigError,
    MisconfigurationException,
    DeadlockError,
    CollectiveMismatchError,
    EvictedError,
)


class Reconfiguration(BaseException):
    """Unwinds the loops at a boundary where all ranks have agreed to reconfigure."""


class ElasticRun:
    """One fit of one rank, over the generations that it takes part in.

    Args:
        strategy: The strategy that trains, in its setup; each rank must call.
        trainer: The Trainer whose fit it is.
        ranks: Say who takes part.
        data_assignment: Assigns the samples of the training loader.
        snapshot_every: Optimizer steps between two snapshots.
        max_failures: How often the same ranks may reconfigure at the same step.
        timeout: How long a rank waits for its buddy.
        buddy_stride: How far away a rank's buddy is: the ranks per host on several hosts, else 1.

    Attributes:
        data_assignment: As given.
        early_end: How this rank's part in the fit ends early.
        stands_behind_step: Whether the state that was just loaded is that behind an optimizer
            step, whose validation, if due, is still to come.
    """

    def __init__(
        self,
        strategy: Reconfigurable,
        trainer: "pl.Trainer",
        ranks: ElasticRanks,
        data_assignment: DataAssignment,
        *,
        snapshot_every: int,
        max_failures: int,
        timeout: timedelta,
        buddy_stride: int,
    ) -> None:
        membership = ranks.membership
        membership.begin_fit()
        self.data_assignment = data_assignment
        self.stands_behind_step = False
        self._strategy = strategy
        self._trainer = trainer
        self._ranks = ranks
        self._snapshot_every = snapshot_every
        self._has_begun = self.is_newcomer
        self._memory = memory = SnapshotMemory(
            strategy,
            trainer,
            data_assignment,
            timeout=timeout,
            stride=buddy_stride,
            buffers=membership.make_buffers(),
            held=membership.held,
        )
        self.early_end = EarlyEnd(strategy, trainer, ranks, memory)
        self._next_generation = NextGeneration(
            strategy,
            trainer,
            ranks,
            data_assignment,
            memory,
            self.early_end,
            max_failures=max_failures,
        )

    def begin_fit(self) -> None:
        """Begin to remember, once engine and optimizers are there; each rank must call."""
        for optimizer in self._strategy.optimizers:
            optimizer.register_step_post_hook(self._memory.forget_live)
        if self.is_newcomer:
            self._trainer.num_sanity_val_steps = 0
        else:
            self._memory.enter(self._ranks.generation)
            _lightning.share_places(self._trainer, self._strategy.broadcast)

    def end_fit(self) -> None:
        """Let go of snapshots and their group, after the strategy's teardown."""
        self._memory.clear()

    # --- what the loops ask -----------------------------------------------------------------------

    @property
    def is_newcomer(self) -> bool:
        """Whether this process goes on from what others, or its predecessors, remember."""
        return self._ranks.membership.has_past or self._ranks.generation.number == 0

    def see_data(self) -> None:
        """Count batches of a checkpoint as those of now, when the training loader is there."""
        self.data_assignment.recount_loaded(self._trainer)

    def assigning_batches(self) -> AbstractContextManager[None]:
        """Return the context in which the training loader is made."""
        return self.data_assignment.assigning_batches(self._trainer)

    def counting_steps(self) -> AbstractContextManager[None]:
        """Return a context in which the same is due behind a step as for the first ranks."""
        return self.data_assignment.counting_steps(self._trainer)

    def begin(self) -> None:
        """Remember the state before the first step, once; each rank must call."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._ranks.generation.is_last:  # too few have come
            self.early_end.save_and_end(self._ranks.generation)
        self.data_assignment.check_alike(self._strategy.collectives)
        self._memory.remember(behind_step=False)
        self._memory.finish()
        self._begin_step()

    def reach_boundary(self) -> None:
        """Remember the state behind an optimizer step, or note how far it is; each rank must call.

        Raises:
            Reconfiguration: All ranks have agreed that somebody joins or leaves here.
            SIGTERMException: This rank leaves, or all do.
        """
        step = self._trainer.global_step
        self.data_assignment.note_step(_lightning.epoch_of_samplers(self._trainer), step)
        self._memory.finish()
        if step % self._snapshot_every == 0:
            self._remember()
        else:
            self._memory.note_progress()
        self._begin_step()

    def finish(self) -> None:
        """Make the module full after the last step, while a loss can still be survived."""
        self._strategy.end_training()

    def survives(self, error: BaseException) -> bool:
        """Whether to reconfigure after this error rather than to end with it."""
        if self.early_end.is_certain or isinstance(error, _FINAL):
            return False
        return isinstance(error, (Exception, Reconfiguration))

    def reconfigure(self, error: BaseException | None) -> None:
        """Go on in the next generation; see `NextGeneration.enter`."""
        self.stands_behind_step = self._next_generation.enter(error)

    def _remember(self) -> None:
        """Take a snapshot, and hear who wants to join or to leave; each rank must call."""
        membership = self._ranks.membership
        said = _NEWCOMER * membership.is_wanted | _LEAVER * membership.is_leaving
        heard = self._memory.remember(behind_step=True, flags=said)
        membership.forget_past()
        if not heard:
            return
        self._memory.finish()
        if heard & _LEAVER:
            self.early_end.let_go()
        raise Reconfiguration

    def _begin_step(self) -> None:
        self._ranks.membership.begin_step(self._trainer.global_step)
