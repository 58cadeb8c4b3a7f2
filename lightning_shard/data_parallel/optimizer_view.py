"""The optimizer's view: each parameter and its `.grad` show the shard that this rank updates.

                  outside                          inside
    param.data    full shape (stage 3: a shard)    this rank's shard, in the master's format (under
                                                   offload that in host memory)
    param.grad    None, a stand-in, or             the averaged gradient of that shard, or None
                  (stage 0) the average            when no rank used the parameter

User code's changes of the full parameters outside are carried over; its changes of gradients inside
are kept. Its hooks before a step run outside, when gradients have been averaged.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.gradients.gradient_shards import AbsentGradients
from lightning_shard.data_parallel.gradients.hand_edits import HandEdits
from lightning_shard.data_parallel.gradients.reducer import Reducer, always
from lightning_shard.data_parallel.memory.equal_weights import EqualWeights
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.units.unsharding import Unsharder
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are


class OptimizerView:
    """Enters and leaves the view of one engine; entering again inside changes nothing."""

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        reducer: Reducer,
        unsharder: Unsharder | None,
        phases: Phases,
        absent: AbsentGradients | None = None,
        edits: HandEdits | None = None,
        weights: EqualWeights | None = None,
    ) -> None:
        self._all = gradients
        self._edits, self._weights = edits, weights
        self._gradients = [g for g in gradients if g.flat.has_local_form]
        self.differs = bool(self._gradients)
        self._reducer = reducer
        self._unsharder = unsharder
        self._absent = absent
        self._phases = phases
        self._num_entered = 0  # and not left yet
        self._outer: list[tuple[FlatGradients, list[Tensor | None]]] = []
        self.on_interrupted: Callable[[], None] | None = None

    def end_interrupted(self) -> None:
        """Leave the view of an update that has never ended, by Ctrl-C say; each rank must call."""
        leave, self.on_interrupted = self.on_interrupted, None
        if leave is not None:
            leave()

    @as_they_are
    def enter(self, shows: Callable[[], bool] = always) -> None:
        """Show shards; each rank must call."""
        if not self._num_entered:
            self.average()
        self._num_entered += 1
        if self._num_entered > 1:
            return
        self._phases.begin(Phase.UPDATE)
        if self._absent is not None:
            self._absent.hide()
        if self.differs:
            self._take_in_edits()
            if shows():
                self._outer = [(one, self._show_shards(one)) for one in self._gradients]

    @as_they_are
    def average(self) -> None:
        """Average what is a rank's own yet; each rank must call."""
        self._reducer.reduce_owed()
        if self._edits is not None:
            self._edits.average()
        for gradients in self._gradients:
            gradients.own.check()

    def _take_in_edits(self) -> None:
        """Let every shard have what user code has made of parameters."""
        if self._unsharder is not None:
            self._unsharder.begin_update()
        for gradients in self._gradients:
            if self._unsharder is None:
                gradients.flat.take_in_edits()
            else:
                gradients.flat.present_shards(sharded=False)
                gradients.flat.see_assigned()

    def _show_shards(self, gradients: FlatGradients) -> list[Tensor | None]:
        params = gradients.flat.params
        outer = [param.grad for param in params]
        for param in params:
            param.grad = None
        gradients.flat.present_master()
        gradients.buffer.bring_down()
        for param, grad in zip(params, gradients.buffer.presented(), strict=True):
            param.grad = grad
        return outer

    @as_they_are
    def leave(self) -> None:
        """Show parameters and gradients as before the view; each rank must call."""
        self._num_entered -= 1
        if not self._num_entered:
            self._end()

    def _end(self) -> None:
        if self._absent is not None:
            self._absent.show()
        self._phases.end(Phase.UPDATE)
        self._leave_shards()
        for gradients in self._all:
            gradients.own.know_content()
        if self._weights is not None:
            self._weights.know()

    def _leave_shards(self) -> None:
        if not self.differs:
            return
        for gradients, outer in self._outer:
            kept = gradients.buffer.take_back(outer)
            for param in gradients.flat.params:
                param.grad = None
            if self._unsharder is None:
                gradients.flat.present_full()
            elif gradients.flat.host is not None:
                gradients.flat.present_local()
            gradients.buffer.restore(kept)
        self._outer = []
        if self._unsharder is not None:
            for gradients in self._gradients:
                gradients.flat.present_shards(sharded=True)
            self._unsharder.after_update()
