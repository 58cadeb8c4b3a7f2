"""Lightning's fit loop, made to go on when ranks are lost or join.

    on_train_start
      epoch ─> batch ─> batch ─> batch ─ ...
                          │        │ a peer is lost, a newcomer is let in
        boundary <────────┘        v
        (after each optimizer     the strategy reconfigures: new groups, state of the last boundary,
         step: remember)          data assigned anew; the loop goes on behind that boundary
    on_train_end

Callbacks and loggers see one run: `on_train_start` comes once, and other hooks are called again for
nothing but what is done again.

The loops derive from Lightning's own, with their private names; checked with lightning 2.6 by
`tests/elastic/test_lightning.py`.
"""

import gc
import warnings

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher
from typing_extensions import override

from lightning_shard.elastic._lightning import FitLoop, TrainingEpochLoop, measure_epoch
from lightning_shard.elastic.run import ElasticRun, Reconfiguration


class ElasticFitLoop(FitLoop):
    """Runs epochs; survives the loss of peers.

    Attributes:
        elastic: The run whose loop it is.
    """

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
    """Runs the batches of an epoch; tells the run of each optimizer step.

    Attributes:
        elastic: The run whose loop it is.
        has_garbage: Whether a generation has ended, whose sockets and buffers may be in cycles of
            errors and the frames that they passed. The first step of the next one does not wait
            for it to be collected.
    """

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

        An epoch draws from them as it makes its iterator, which `FitLoop.setup_data` has done too
        early where a fit is resumed at an epoch's beginning.
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
