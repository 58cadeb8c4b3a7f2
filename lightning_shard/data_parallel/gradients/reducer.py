"""When gradients travel: each unit as soon as it is complete, in one order on every rank.

    backward   |  unit 2  |  unit 1  |  unit 0  |  end
    reduce                |- unit 2 -|- unit 1 -|- unit 0, and what stayed incomplete
                                                |- which parameters were used

Collectives of one group must start in the same order everywhere, even when ranks touch different
parts of the model. So a unit starts only after those before it in a fixed order: at first the
reverse of registration, then the order in which rank 0's first backward completed them.

Under stage 3 backward unshards, too. A rank that waits for a reduction while another waits for an
unshard would wait for ever; so a block is reduced when backward has left it, whatever it used, and
the root unit's parameters, of which some rank may use less, after all blocks. A block whose input
has no gradient is begun at the end by ranks that have not used all of it, and nobody waits for it
before. Where units stay for a step blocks are watched once an incomplete unit has held others up.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.states import State, setting
from lightning_shard.data_parallel.gradients.early_clipping import EarlyClipping
from lightning_shard.data_parallel.gradients.flat_gradients import IS_LEFT, IS_SENT, FlatGradients
from lightning_shard.data_parallel.gradients.hand_edits import HandEdits
from lightning_shard.data_parallel.gradients.usage import UsageAgreement, UsageOfSeveral
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.torch_private import (
    TELLS_OF_ARRIVAL,
    hooks_after_gradient,
    queue_after_backward,
)
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.tensor_properties import REQUIRES_GRAD
from lightning_shard.errors import ConfigError


class ArrivalHooks:
    """Watches parameters for gradients, from when they require one."""

    def __init__(
        self,
        positions: Mapping[nn.Parameter, tuple[int, int]],
        hook_of: Callable[[int, int], Callable[[Tensor], None]],
    ) -> None:
        self._positions, self._hook_of = positions, hook_of
        self._handles: list[RemovableHandle] = []
        self._unwatched = list(positions)

    @as_they_are
    def watch(self) -> None:
        """Watch parameters that have come to require gradients (unfrozen ones, too)."""
        if not [param for param in self._unwatched if param.requires_grad]:
            return
        for param in (param for param in self._unwatched if param.requires_grad):
            self._handles.append(self._hook(param, *self._positions[param]))
        self._unwatched = [param for param in self._unwatched if not param.requires_grad]

    def _hook(self, param: nn.Parameter, position: int, index: int) -> RemovableHandle:
        hook = self._hook_of(position, index)
        setattr(hook, TELLS_OF_ARRIVAL, True)
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def refuse_others(self, param: nn.Parameter, rank: int) -> None:
        """Raise if hooks of user code wait for a gradient that autograd's own pass does not add."""
        if others_wait_for(param):
            shape = tuple(param.shape)
            raise ConfigError(
                f"Rank {rank}: a parameter of shape {shape} has a hook of "
                f"register_post_accumulate_grad_hook, which a pipeline would not call: it adds up "
                f"the gradients of microbatches itself. Use .grad in on_after_backward, change "
                f"the gradient in a hook of param.register_hook, or use strategy='zero2'."
            )

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()
        self._unwatched = list(self._positions)


def others_wait_for(param: nn.Parameter) -> bool:
    """Whether user code is called once a parameter's gradient has been added up."""
    return not all(hasattr(hook, TELLS_OF_ARRIVAL) for hook in hooks_after_gradient(param))


_MAX_IN_FLIGHT = 2  # bounds the memory of full gradients under stages 2 and 3


class BackwardKinds:
    """Knows of which kinds of backwards each brings every gradient once.

    A reentrant checkpoint runs a backward of its own within the backward, so that what two of them
    call gets its gradient twice. Before the first of both one knows which functions checkpoints
    have called in the forwards, and which parameters are trained: they are a backward's kind.
    Where gradients may come twice, a rank whose stage keeps full gradients begins no reduction
    before the backward's end. Ranks may differ in that: the order of reductions is the same.
    """

    def __init__(self) -> None:
        self._called: Counter[int] = Counter()
        self._is_over = False
        self._now = 0
        self._brings_once: dict[int, bool] = {}  # by kind

    def note(self, function: Any) -> None:
        """Note that a reentrant checkpoint calls a function in a forward."""
        if self._is_over:
            self._called, self._is_over = Counter(), False
        function = getattr(function, "func", function)  # of a partial function
        code = getattr(function, "__code__", function)  # a lambda is another one in each step
        self._called[id(getattr(function, "__self__", code))] += 1  # of a method, its module

    def begin(self, params: Iterable[Tensor]) -> bool:
        """Return whether a backward that begins may bring a gradient twice."""
        trained = tuple(map(REQUIRES_GRAD, params)) if self._called else ()
        self._now = hash((frozenset(self._called.items()), trained))
        return not self._brings_once.get(self._now, False)

    def end(self, *, came_twice: bool) -> None:
        """Note that it has ended; the next one may be of the same forwards."""
        self._is_over, self._brings_once[self._now] = True, not came_twice


def always() -> bool:
    """Return True: of one engine's backwards, each is for its model."""
    return True


class Owed(State):
    """What a reducer owes: gradients that only this rank has."""

    NOTHING = "NOTHING ARRIVING SUMS"
    ARRIVING = "NOTHING SUMS"  # those of a backward that is under way
    SUMS = "SUMS ARRIVING_TO_SUMS NOTHING"  # those of micro-batches that were accumulated only
    ARRIVING_TO_SUMS = "SUMS NOTHING"


HAS_ARRIVED = (Owed.ARRIVING, Owed.ARRIVING_TO_SUMS)
HAS_SUMS = (Owed.SUMS, Owed.ARRIVING_TO_SUMS)


class Reducer:
    """Reduces a model's gradients while backward runs.

    Args:
        gradients: The gradient buffers, in registration order.
        collectives: Group of the data-parallel ranks.
        usage: Agrees with the other ranks on the parameters that have a gradient.
        phases: What the engine does now.
        edits: Knows whether user code may meet `.grad` between micro-batches, as hooks do; None
            where each rank has its own, so that nobody meets one that looks full.
        clipping: Prepares the reductions that begin at the end of a backward; None without.
    """

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        collectives: Collectives,
        usage: UsageAgreement | UsageOfSeveral,
        phases: Phases,
        edits: HandEdits | None = None,
        clipping: EarlyClipping | None = None,
    ) -> None:
        self._gradients = gradients
        self._collectives = collectives
        self.usage = usage
        self._phases, self._edits, self._clipping = phases, edits, clipping
        self._order = list(reversed(range(len(gradients))))
        self.learnt_order: list[int] = []
        self._completed: dict[FlatGradients, None] = {}  # in this backward, or left, in order
        self._cursor = 0  # in _order: what has been reduced
        self._in_flight: deque[FlatGradients] = deque()
        self.owed = Owed.NOTHING
        self.was_held_up = False
        self.synchronises = True
        self.has_exchanged = False
        self.kinds, self._holds = BackwardKinds(), False

    @property
    def _is_met(self) -> bool:
        return self._edits is not None and self._edits.are_expected

    def take_exchanged(self) -> bool:
        """Return whether gradients have been exchanged since this was asked last."""
        exchanged, self.has_exchanged = self.has_exchanged, False
        return exchanged

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only: stages 0 and 1 send no gradients, 2 and 3 as ever (their memory).

        Where user code may meet `.grad`, ranks agree which gradients there are from stage 1 on.
        """
        return setting(self, synchronises=False)

    @contextmanager
    def backward(self, is_used: Callable[[], bool] = always) -> Iterator[None]:
        """Run a backward inside; on leaving it, the gradients are reduced.

        Args:
            is_used: Returns at its end whether any rank has a gradient of it here; if none has,
                nothing is sent.
        """
        with self._phases.within(Phase.BACKWARD):
            try:
                yield
            except BaseException:
                self._reset()
                raise
        if is_used():
            self.flush()
        else:
            self._reset()

    def arrive(self, position: int, index: int) -> None:
        """Note that autograd has put a gradient on parameter `index` of buffer `position`.

        As in `take`, the caller sees `shards_as_they_are`.
        """
        gradients = self._gradients[position]
        if self.owed not in HAS_ARRIVED:
            if Phase.BACKWARD not in self._phases.open:
                queue_after_backward(self.flush)  # a bare loss.backward()
            after = Owed.ARRIVING_TO_SUMS if self.owed in HAS_SUMS else Owed.ARRIVING
            self.owed = self.owed.to(after)
            self._begin_arrivals()
        if gradients.buffer.full is None:  # which gets the memory that is free by then
            self._finish_ready()
        if gradients.arrivals.gathers:
            gradients.arrivals.waiting.append(index)
            gradients.accept_waiting()
        else:
            gradients.accept(index)
        if gradients.state not in IS_SENT and gradients.is_complete:
            self._completed.setdefault(gradients)
            self._begin(self._ready())

    def _begin_arrivals(self) -> None:
        for gradients in self._gradients:
            gradients.buffer.give_up_zeroed()
        self._holds = self.kinds.begin(p for one in self._gradients for p in one.flat.params)

    def take(self, position: int, index: int, grad: Tensor) -> None:
        """Take a gradient that was computed outside autograd's own pass, inside `backward`."""
        gradients = self._gradients[position]
        gradients.take(index, grad)
        if gradients.state not in IS_SENT and gradients.is_complete:
            self._completed.setdefault(gradients)
            self._begin(self._ready())

    @as_they_are
    def close(self, closed: Iterable[FlatGradients]) -> None:
        """Note that backward has left these buffers' modules, so that no gradient comes any more.

        Gradients that are computed outside autograd's own pass, of a microbatch say, come later.
        """
        if Phase.BACKWARD not in self._phases.open and self.owed not in HAS_ARRIVED:
            return
        for gradients in closed:
            gradients.close()
            self._completed.setdefault(gradients)
        self._begin(self._ready())

    def _ready(self) -> Iterator[FlatGradients]:
        """Yield those whose reductions may begin now, in the order that all ranks keep to."""
        while self._cursor < len(self._order):
            gradients = self._gradients[self._order[self._cursor]]
            if gradients.is_trained and not gradients.waits_for_end:
                if not gradients.is_complete or not self._reduces_now(gradients):
                    return
                yield gradients
            self._cursor += 1

    def _reduces_now(self, gradients: FlatGradients) -> bool:
        return (self.synchronises and not self._holds) or not gradients.accumulates

    def _begin(self, several: Iterable[FlatGradients]) -> None:
        for gradients in several:
            while len(self._in_flight) >= _MAX_IN_FLIGHT and self._may_finish(self._in_flight[0]):
                self._in_flight.popleft().finish_reduce()
            for one in takewhile(self._may_wait, self._in_flight):
                one.continue_reduce()
            gradients.begin_reduce(synchronised=self.synchronises)
            self._in_flight.append(gradients)

    def _finish_ready(self) -> None:
        """Finish reductions that have ended, so that their memory is free, or used again."""
        while self._in_flight and self._in_flight[0].is_reduced_by_all:
            self._in_flight.popleft().finish_reduce()

    def _may_finish(self, gradients: FlatGradients) -> bool:
        """Whether a reduction has ended, or may be waited for, to have its memory."""
        keeps_memory = gradients.accumulates and gradients.exchange is None
        return gradients.is_reduced_by_all or (not keeps_memory and self._may_wait(gradients))

    def _may_wait(self, gradients: FlatGradients) -> bool:
        """Whether to wait for a reduction: before a backward ends, whether all begin it now."""
        # A rank that has not used all of a unit begins it once backward has left that unit. Until
        # then it may wait for this rank itself, to unshard a unit or to exchange tokens.
        # What is sent in two halves is not continued then: some ranks would begin others first.
        if not self.usage.may_differ_in_backward:
            return True
        return gradients.state in IS_LEFT and not gradients.sends_twice

    @as_they_are
    def flush(self) -> None:
        """End a backward: reduce what is left, agree on usage, wait for everything."""
        for gradients in self._gradients:
            gradients.accept_waiting()
        self._see_held_up()
        self._holds = False
        if self.owed in HAS_ARRIVED:
            self.kinds.end(came_twice=any(one.came_twice for one in self._gradients))
        in_turn = sorted(
            [self._gradients[position] for position in self._order],
            key=attrgetter("waits_for_end"),  # last, since other ranks may have begun the rest
        )
        for gradients in in_turn:
            gradients.close()
        due = [one for one in in_turn if one.must_reduce and self._reduces_now(one)]
        if due and self._clipping is not None:
            self._clipping.prepare()
        late = [one for one in due if one.state in IS_SENT]  # for the second time
        self._begin(one for one in due if one not in late)
        self._flush_frozen()
        agrees = self.synchronises or self._shows_averages()
        if agrees:
            self.usage.begin(late)  # before any rank waits for what only this one may send
        self._begin(late)
        while self._in_flight:
            self._in_flight.popleft().finish_reduce()
        self.usage.finish()
        for gradients in self._gradients if agrees else ():
            gradients.buffer.settle()
        for gradients in self._gradients if not self.synchronises else ():
            gradients.add_in_order()
        self.owed = self.owed.to(Owed.NOTHING if self.synchronises else Owed.SUMS)
        self.has_exchanged |= self.synchronises
        self._learn_order()
        self._reset()

    def _see_held_up(self) -> None:
        late = [self._gradients[position] for position in self._order[self._cursor + 1 :]]
        is_late = any(one.is_complete and not one.waits_for_end for one in late if one.is_trained)
        self.was_held_up |= bool(self.learnt_order) and self.synchronises and is_late

    def _shows_averages(self) -> bool:
        """Whether code may meet a `.grad` that looks full where ranks have only added up theirs."""
        # It asks `if p.grad is not None`, and must find the same on every rank.
        shows = self._is_met and not all(one.shows_no_averages for one in self._gradients)
        for gradients in self._gradients if shows else ():
            gradients.buffer.observe_all()  # of all, since `settle` shows what it knows of all
        return shows

    def _flush_frozen(self) -> None:
        """Reduce what was accumulated before a unit was frozen, after all others on each rank."""
        for gradients in [self._gradients[position] for position in self._order]:
            if not self.synchronises:
                gradients.note_accumulated()
                continue
            if gradients.is_owed:
                self._begin([gradients])
            gradients.note_frozen()

    def reduce_owed(self) -> None:
        """Reduce gradients that `no_sync` has only accumulated, before an optimizer uses them."""
        if self.owed in HAS_SUMS:
            with setting(self, synchronises=True):
                self.flush()

    def reduce_asked(self) -> None:
        """Reduce gradients that `no_sync` only accumulated, for user code that asks for them."""
        if self.owed in HAS_SUMS and not self._is_met:
            self.usage.check_equal()
        self.reduce_owed()

    def follow(self, order: Sequence[int]) -> None:
        """Reduce in an order that another reducer of the same model has learnt, on each rank."""
        if order:
            self._order = self.learnt_order = [*order]

    def _learn_order(self) -> None:
        if self.learnt_order or not self.synchronises or not self._gradients:
            return
        completed = [self._gradients.index(one) for one in self._completed]
        rest = [position for position in self._order if position not in completed]
        order = self._collectives.broadcast_object([*completed, *rest], src=0)
        self._order = self.learnt_order = order

    @as_they_are
    def _reset(self) -> None:
        self._cursor, self._completed, self._holds = 0, {}, False
        self.owed = self.owed.to(Owed.SUMS if self.owed in HAS_SUMS else Owed.NOTHING)
        self._in_flight.clear()
        for gradients in self._gradients:
            gradients.end_backward()
