"""The optimizer's view: each parameter and its `.grad` show the shard that this rank updates.

                  outside                          inside
    param.data    full shape (stage 3: a shard)    this rank's shard, in the master's format (under
                                                   offload that in host memory)
    param.grad    None, a stand-in, or             the averaged gradient of that shard, or None
                  (stage 0) the average            when no rank used the parameter

User code's changes of the full parameters outside are carried over; its changes of gradients inside
are kept. Its hooks before a step are lent stand-ins for the gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lightning_shard.core.states import State
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.gradients.gradient_shards import AbsentGradients
from lightning_shard.data_parallel.gradients.hand_edits import HandEdits
from lightning_shard.data_parallel.gradients.reducer import Reducer, always
from lightning_shard.data_parallel.memory.equal_weights import EqualWeights
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.units.unsharding import Unsharder
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are


class Shown(State):
    """What parameters and gradients show."""

    FULL = "SHARDS"  # or what else they show outside of the view
    SHARDS = "LENT FULL"
    LENT = "SHARDS_AMID SHARDS"  # what looks full, for hooks of user code before a step
    SHARDS_AMID = "LENT"  # for an optimizer that such a hook has called


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
        self._shown = Shown.FULL
        self._num_within = 0  # entered again inside, and not left yet
        self._outer: list[tuple[FlatGradients, list[Tensor | None]]] = []
        self._offloaded = [g.flat for g in self._gradients if g.flat.host is not None]
        self._marks: list[int] = []  # of those, while the view is lent
        self.on_interrupted: Callable[[], None] | None = None

    @property
    def is_lent(self) -> bool:
        """Whether user code sees the shards now."""
        return self._shown in (Shown.LENT, Shown.SHARDS_AMID)

    def end_interrupted(self) -> None:
        """Leave the view of an update that has never ended, by Ctrl-C say; each rank must call."""
        leave, self.on_interrupted = self.on_interrupted, None
        if leave is not None:
            leave()

    @as_they_are
    def enter(self, shows: Callable[[], bool] = always) -> None:
        """Show shards; each rank must call."""
        if self._shown is Shown.LENT:
            self._turn(Shown.SHARDS_AMID)
            self._take_back_stand_ins()
        elif self._shown is not Shown.FULL:
            self._num_within += 1
        else:
            self._average()
            self._turn(Shown.SHARDS)
            self._phases.begin(Phase.UPDATE)
            if self._absent is not None:
                self._absent.hide()
            if self.differs:
                self._take_in_edits()
                if shows():
                    self._outer = [(one, self._show_shards(one)) for one in self._gradients]

    def _turn(self, shown: Shown) -> None:
        self._shown = self._shown.to(shown)

    def _average(self) -> None:
        """Average what is a rank's own yet."""
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
            gradients.flat.present_shards(sharded=False)
            if self._unsharder is None:
                gradients.flat.take_in_edits()
            else:
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

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run user code inside, to which `.grad` looks as the full gradient does; collective."""
        self._begin_lending()
        try:
            yield
        finally:
            self._end_lending()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the view inside, if it is lent, and enter it again."""
        if not self.is_lent:
            yield
            return
        self._end_lending()
        try:
            yield
        finally:
            self._begin_lending()

    @as_they_are
    def _begin_lending(self) -> None:
        self.enter()
        self._marks = [flat.mark() for flat in self._offloaded]
        self._turn(Shown.LENT)
        self._lend_stand_ins()

    @as_they_are
    def _end_lending(self) -> None:
        if not self.is_lent:  # what began it has failed
            return
        if self._unsharder is not None:  # a hook may have called a part of a block
            self._unsharder.begin_update()
            for gradients in self._gradients:
                gradients.flat.present_master()
        self._take_back_stand_ins()
        for flat, mark in zip(self._offloaded, self._marks, strict=True):
            if flat.mark() != mark:
                flat.send_up()
        self._turn(Shown.SHARDS)
        self.leave()

    def _lend_stand_ins(self) -> None:
        for gradients in self._gradients:
            gradients.flat.present_shards(sharded=True)
            nothing = [None] * len(gradients.states)
            gradients.buffer.take_back(nothing)  # what was made of them meanwhile
            indices = range(len(gradients.states))
            gradients.flat.stand_ins.put(filter(gradients.buffer.is_there, indices))
        if self._absent is not None:
            self._absent.show()

    def _take_back_stand_ins(self) -> None:
        """Show shards again; what user code has zeroed or set in `.grad` stays so."""
        for gradients in self._gradients:
            gradients.flat.present_shards(sharded=False)
            gradients.flat.see_assigned()  # of `param.set_(full)`, unseen
            gradients.buffer.observe_all()
            presented = gradients.buffer.presented()
            for param, grad in zip(gradients.flat.params, presented, strict=True):
                if isinstance(param.grad, AveragedGradient):
                    param.grad = grad
        if self._absent is not None:
            self._absent.hide()

    @as_they_are
    def leave(self) -> None:
        """Show parameters and gradients as before the view; each rank must call."""
        if self._num_within:
            self._num_within -= 1
        elif self._shown is Shown.SHARDS_AMID:
            self._turn(Shown.LENT)
            self._lend_stand_ins()
        else:
            self._turn(Shown.FULL)
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
        for gradients in self._gradients:
            gradients.flat.present_shards(sharded=self._unsharder is not None)
        self._outer = []
        if self._unsharder is not None:
            self._unsharder.after_update()
