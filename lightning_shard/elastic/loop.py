"""Lightning's fit loop, made to go on when ranks are lost or join.

    on_train_start
      epoch ─> batch ─> batch ─> batch ─ ...
                          │        │ a peer is lost, a newcomer is let in
        boundary <────────┘        v
        (after each optimizer     the strategy reconfigures: new groups, state of the last boundary,
         step: remember)          data assigned anew; the loop goes on behind that boundary
    on_train_end

Where a peer dies, or raises an error of its own, whoever waits for it gets RankFailedError, and the
loop goes on. A bad option, a mistake that all ranks make, or an error after the fit ends the run.

Callbacks and loggers see one run: `on_train_start` comes once, and other hooks are called again for
nothing but what is done again. The loops derive from Lightning's own, with their private names;
checked with lightning 2.6 by `tests/elastic/test_lightning.py`.
"""

import gc
import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.fetchers import _DataFetcher
from typing_extensions import override

from lightning_shard.checkpoint.random_state import load_random_state
from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.elastic import _lightning
from lightning_shard.elastic._lightning import FitLoop, TrainingEpochLoop, measure_epoch
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.elastic.recovery import EarlyEnd, NextGeneration
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.errors import CollectiveMismatchError, ConfigError, DeadlockError, EvictedError

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


class ElasticRun(SharedByCopies):
    """One fit of one rank, over the generations that it takes part in.

    Attributes:
        random: This rank's random streams in the checkpoint that was just loaded, until the fit
            goes on with them; None where it has none, or its ranks were others.
        has_begun: Whether the state before the first step has been remembered, here or by others.
        stands_behind_step: Whether the state that was just loaded is that behind an optimizer
            step, whose validation, if due, is still to come.
    """

    def __init__(self, fit: ElasticFit) -> None:
        membership = fit.ranks.membership
        membership.begin_fit()
        self.data_assignment = fit.data_assignment
        self.hook_values = fit.hook_values
        self.stands_behind_step = False
        self.random: Mapping[str, Any] | None = None
        self._fit = fit
        self.has_begun = self.is_newcomer
        self._memory = SnapshotMemory(fit, membership.make_buffers(), membership.held)
        self.early_end = EarlyEnd(fit, self._memory)
        self._next_generation = NextGeneration(fit, self._memory, self.early_end)

    def begin_fit(self) -> None:
        """Begin to remember, once engine and optimizers are there; each rank must call."""
        for optimizer in self._fit.strategy.optimizers:
            optimizer.register_step_post_hook(self._memory.forget_live)
        if self.is_newcomer:
            self._fit.trainer.num_sanity_val_steps = 0
        else:
            self._memory.enter(self._fit.ranks.generation)
            _lightning.share_places(self._fit.trainer, self._fit.strategy.broadcast)

    def end_fit(self) -> None:
        """Let go of snapshots and their group, after the strategy's teardown."""
        self._memory.clear()

    # --- what the loops ask -----------------------------------------------------------------------

    @property
    def is_newcomer(self) -> bool:
        """Whether this process goes on from what others, or its predecessors, remember."""
        return self._fit.ranks.membership.has_past or self._fit.ranks.generation.number == 0

    def begin(self) -> None:
        """Remember the state before the first step, once; each rank must call."""
        if self.has_begun:
            return
        self.has_begun = True
        if self._fit.ranks.generation.is_last:  # too few have come
            self.early_end.save_and_end(self._fit.ranks.generation)
        self.data_assignment.check_alike(self._fit.strategy.collectives)
        self.data_assignment.begin(self._fit.ranks.membership.started_by)
        self._memory.remember(behind_step=False)
        self._memory.finish()
        self._begin_step()

    def reach_boundary(self) -> None:
        """Remember the state behind an optimizer step, or note how far it is; collective."""
        step = self._fit.trainer.global_step
        self.data_assignment.note_step(_lightning.epoch_of_samplers(self._fit.trainer), step)
        self._memory.finish()
        if step % self._fit.snapshot_every == 0:
            self._remember()
        else:
            self._memory.note_progress()
        self._begin_step()

    def go_on_drawing(self) -> bool:
        """Go on with the random streams of a checkpoint that was just loaded, if it has them."""
        random, self.random = self.random, None
        if random is not None:
            load_random_state(random, self._fit.strategy.root_device)
        return random is not None

    def finish(self) -> None:
        """Make the module full after the last step, while a loss can still be survived."""
        self._fit.strategy.end_training()

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
        membership = self._fit.ranks.membership
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
        self._fit.ranks.membership.begin_step(self._fit.trainer.global_step)


class ElasticFitLoop(FitLoop):
    """Runs epochs; survives the loss of peers."""

    elastic: ElasticRun

    @override
    def setup_data(self) -> None:
        with self.elastic.data_assignment.assigning_batches():
            super().setup_data()
        if self._combined_loader is not None:
            measure_epoch(self.trainer)

    @override
    def run(self) -> None:
        self.setup_data()
        if self.skip:
            return
        self.elastic.data_assignment.recount_loaded()
        self.reset()
        self.on_run_start()
        self.elastic.hook_values.begin()
        if self.elastic.is_newcomer:
            self._survive(Reconfiguration())
        self._run_epochs()
        while not self._end():
            self._run_epochs()

    def _run_epochs(self) -> None:
        while self.elastic.stands_behind_step or not self.done:
            if not self._run_epoch():
                break

    def _end(self) -> bool:
        """End the run; return False if peers were lost meanwhile, and steps may be to do again."""
        self._restarting = False
        try:
            self.on_run_end()
            self.elastic.finish()
        except BaseException as error:
            self._survive(error)
            return False
        return True

    @override
    def on_advance_start(self) -> None:
        begins = not (self.restarted_mid_epoch or self.restarted_on_epoch_end)
        super().on_advance_start()
        if begins:
            self.elastic.hook_values.held()
        measure_epoch(self.trainer)
        self.elastic.begin()

    @override
    def on_advance_end(self) -> None:
        # An epoch that was taken up ends like any other. Lightning takes it for one that had ended
        # before a checkpoint, and leaves out the step of schedulers that go by epochs.
        self._restarting = False
        super().on_advance_end()

    def _run_epoch(self) -> bool:
        """Run an epoch, or what is left of it; return whether there may be another one."""
        failure: BaseException | None = None
        try:
            self.on_advance_start()
            self.advance()
            self.on_advance_end()
        except StopIteration:
            return False
        except BaseException as error:
            failure = error
        finally:
            self.on_iteration_done()
        if failure is not None:
            self._survive(failure)
        return True

    def _survive(self, error: BaseException) -> None:
        """Reconfigure, as often as peers are lost meanwhile."""
        while self.elastic.survives(error):
            try:
                self.elastic.reconfigure(None if isinstance(error, Reconfiguration) else error)
            except BaseException as another:
                error = another
            else:
                self.reset()
                self.epoch_loop.has_garbage = True
                return
        raise error


class ElasticEpochLoop(TrainingEpochLoop):
    """Runs the batches of an epoch; tells the run of each optimizer step."""

    elastic: ElasticRun
    has_garbage = False

    @override
    def reset(self) -> None:
        with warnings.catch_warnings():
            # Lightning's advice about loaders that begin an epoch anew; these go on
            warnings.filterwarnings("ignore", ".*checkpoint that ended before the epoch ended")
            super().reset()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Begin or take up an epoch; a resumed fit goes on with the checkpoint's random numbers.

        An epoch draws as it makes its iterator, as `setup_data` has done too early for such a fit.
        """
        if self.batch_progress.current.ready:
            super().on_run_start(data_fetcher)
            self.elastic.go_on_drawing()
            return
        has_drawn, iterator = self.elastic.go_on_drawing(), data_fetcher.iterator
        super().on_run_start(data_fetcher)
        if has_drawn and data_fetcher.iterator is iterator:
            iter(data_fetcher)

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        if self.elastic.stands_behind_step:
            self.elastic.stands_behind_step = False
            return  # to what follows the step: validation
        step = self.global_step
        super().advance(data_fetcher)
        if self.global_step > step:  # not so where a validation is all that is left of a step
            self.elastic.reach_boundary()
            if self.has_garbage:
                self.has_garbage = False
                gc.collect()

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        with self.elastic.data_assignment.counting_steps():
            return super()._should_check_val_fx(data_fetcher)

    @override
    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        with self.elastic.data_assignment.counting_steps():
            super()._update_learning_rates(interval, update_plateau_schedulers)


def make_elastic(trainer: "pl.Trainer", elastic: ElasticRun) -> None:
    """Exchange the trainer's loops, in place: callbacks and connectors hold them."""
    for loop, kind in (
        (trainer.fit_loop, ElasticFitLoop),
        (trainer.fit_loop.epoch_loop, ElasticEpochLoop),
    ):
        loop.__class__ = kind
        vars(loop)["elastic"] = elastic
