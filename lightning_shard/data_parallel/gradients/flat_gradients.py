"""The gradients of one flat buffer: collected as backward makes them, reduced, kept in shards.

    autograd ──copy──> full (views) ──reduce──> local (views) ──> the optimizer's `.grad`

    stage   full                          local
    0       kept; all-reduced in place    the same memory
    1       kept; reduced into own part   this rank's part of `full`
    2, 3    from the first gradient of a  memory of its own (1/N), reduced gradients are added
            backward to its reduction     to it at every backward
    With a master copy, stages 0 and 1 keep `full` in its format: micro-batches add up there.
    With compression an `Exchange` reduces, in two halves that begin where dense reductions do.

Where a gradient lies is its `GradientState`; the memory, and what stands in `.grad`, are those of
a `GradientBuffer`; here is when they arrive and travel.
"""

from collections.abc import Collection, Sequence
from operator import and_, is_, not_, or_
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.core.states import State
from lightning_shard.data_parallel.compression.compressor import Compressor, Exchange, FlatBuffer
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.gradients.gradient_buffer import GradientBuffer
from lightning_shard.data_parallel.gradients.tree_sum import TreeExchange
from lightning_shard.data_parallel.memory.flat_memory import full_views
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.torch_private import after_gradient
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.tensor_properties import (
    IS_SPARSE,
    OWN_GRAD,
    REQUIRES_GRAD,
    num_trained,
    unrecorded,
)
from lightning_shard.errors import ConfigError

_HELD_BYTES = 1 << 20  # of gradients that wait, beside those of one parameter


class OwnGradients:
    """The gradients of one buffer that user code has made or edited, a rank's own until averaged.

    `HandEdits` asks every buffer, compares ranks and has gradients averaged again: in place under
    stage 0, else as those of a backward are, see `FlatGradients.reduce_given`.
    """

    def __init__(self, buffer: GradientBuffer, ranks: Collectives) -> None:
        self.ranks = ranks
        self._buffer = buffer
        self._flat = buffer.flat
        self._version = 0  # of the full buffer, once it was reduced

    def name(self, index: int) -> str:
        """Return the name of a parameter in the model."""
        return self._flat.layout.slots[index].name

    def know_content(self) -> None:
        """Note that the gradients that lie in the buffer now are the same on all ranks."""
        if self._flat.stage == 0 and self._buffer.full is not None:
            self._version = self._buffer.full._version

    @property
    def are_edited(self) -> bool:
        """Whether user code has changed gradients since `know_content`, by a quick check here."""
        if self.are_there:
            return True
        full = self._buffer.full
        return self._flat.stage == 0 and full is not None and full._version != self._version

    @property
    def are_there(self) -> bool:
        """Whether a tensor of the user's stands in some `.grad`."""
        return any(self._which_are_own())

    @property
    def which_are_there(self) -> list[bool]:
        """Whether each parameter has a gradient here, under stage 0; later stages have agreed."""
        if self._flat.stage > 0:
            return []
        return [param.grad is not None for param in self._flat.params]

    @as_they_are
    def _which_are_own(self) -> list[bool]:
        """Return of each parameter whether a tensor of the user's stands in `.grad`."""
        self._buffer.see_assigned()
        views: Sequence[Tensor | None] = self._buffer.views or [None] * len(self._flat.params)
        grads = [*map(OWN_GRAD, self._flat.params)]
        if all(map(is_, grads, views)):
            return [False] * len(grads)
        return [
            not (grad is None or grad is view or isinstance(grad, AveragedGradient))
            for grad, view in zip(grads, views, strict=True)
        ]

    def kinds(self) -> list[tuple[bool, bool]]:
        """Whether a tensor of the user's stands in each `.grad`, or one of the engine's."""
        kinds = []
        for index, is_own in enumerate(self._which_are_own()):
            grad = self._flat.params[index].grad
            if is_own and grad is not None and grad.shape != self._flat.layout.slots[index].shape:
                raise self._set_by_hand(index)
            kinds.append((is_own, not is_own and grad is not None))
        return kinds

    @property
    def held_everywhere(self) -> Tensor | None:
        """The memory of all gradients, under stage 0; zero where there is no gradient."""
        if self._flat.stage > 0 or self._buffer.full is None:
            return None
        self._buffer.observe_all()
        for index, param in enumerate(self._flat.params):
            if param.grad is None:
                self._buffer.views[index].zero_()
        return self._buffer.full

    @unrecorded
    def take_in(self) -> None:
        """Under stage 0, copy the tensors that user code has put into `.grad` to the buffer."""
        which = self._which_are_own()
        for index in (index for index, is_own in enumerate(which) if is_own):
            param = self._flat.params[index]
            grad, param.grad = param.grad, None
            assert grad is not None
            self._buffer.allocate()
            self._buffer.views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
            self._buffer.states.arrive(index)
            self._show(index)

    @unrecorded
    def send_along(self, indices: Sequence[int]) -> None:
        """Let a reduction take tensors of the user's, which backward has added nothing to."""
        for index in indices:
            param = self._flat.params[index]
            grad, shape = param.grad, self._flat.layout.slots[index].shape
            if grad is None or grad.shape != shape:
                raise self._set_by_hand(index)
            param.grad = None
            self._buffer.forget([index])
            self._buffer.store(index, grad.to_dense() if grad.is_sparse else grad)

    def _show(self, index: int) -> None:
        buffer = self._buffer
        buffer.states.show(index)
        if buffer.is_plain:
            self._flat.params[index].grad = buffer.views[index]
        else:
            self._flat.stand_ins.put([index])

    @unrecorded
    def average_again(self, there: Sequence[bool]) -> None:
        """Under stage 0, average the gradients in the buffer once more; each rank must call."""
        if self._buffer.full is None:
            self._buffer.allocate().zero_()
        full = self._buffer.allocate()
        self.ranks.all_reduce(full, "avg").wait()
        for index, is_there in enumerate(there):
            if is_there:
                self._show(index)
        self._buffer.states.all_leave()
        self.know_content()

    @as_they_are
    def check(self) -> None:
        """Raise if a tensor of the user's stands in some `.grad` before the optimizer's view."""
        for index in self._buffer.observe_all():
            raise self._set_by_hand(index)

    def _set_by_hand(self, index: int) -> ConfigError:
        return ConfigError(
            f"Rank {self.ranks.rank}: .grad of {self.name(index)!r} was set by hand to what has "
            f"not the parameter's own shape, expected gradients to come from backward, which "
            f"averages them over the ranks. Call self.manual_backward(loss), or use "
            f"strategy='shard_ddp'."
        )


class Arrivals:
    """The gradients of one buffer that wait.

        first backward     every gradient is taken as it comes, and the order is learnt
        later ones         a: begins | b c d wait | e: b to e are taken | f g wait | h: the last

    To take one gradient costs the host a dozen calls, most of which can be made for many at once.
    Others are taken every few kilobytes, so that no more is held twice, and at the latest when the
    buffer is reduced. Nobody waits where user code is called with a gradient that is added up.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.waiting: list[int] = []
        self.gathers = False
        self.ends: frozenset[int] = frozenset()
        self._num_known = 0
        self._hooks: list[dict[int, object]] = []  # of each parameter that has come

    def begin(self) -> None:
        """Note that a backward has brought the first gradient, which has been taken."""
        self.gathers = bool(self.ends) and sum(map(len, self._hooks)) == len(self._hooks)

    def take(self) -> list[int]:
        """Return the indices of all that wait, which are taken now; autograd adds up what waits."""
        waiting = [*dict.fromkeys(self.waiting)]
        self.waiting.clear()
        return waiting

    def end(self, order: Sequence[int]) -> None:
        """Note that a backward has ended."""
        self.gathers = False
        self.waiting.clear()
        if order and (len(order) != self._num_known or order[-1] not in self.ends):
            self._learn(order)

    def _learn(self, order: Sequence[int]) -> None:
        ends, held = [], 0
        for index in order:
            held += self._params[index].nbytes
            if held >= _HELD_BYTES or index == order[-1]:
                ends.append(index)
                held = 0
        self.ends, self._num_known = frozenset(ends), len(order)
        self._hooks = [hooks for p in self._params if (hooks := after_gradient(p)) is not None]


class InBackward(State):
    """What a backward has done yet to the gradients of one buffer.

    ARRIVING ── its modules are left ──> LEFT ── a reduction begins ──> DONE
        └────── a reduction begins ────> SENT ── its modules are left ──> DONE
    """

    ARRIVING = "LEFT SENT"
    LEFT = "DONE ARRIVING"
    SENT = "DONE ARRIVING"
    DONE = "ARRIVING"


IS_LEFT = (InBackward.LEFT, InBackward.DONE)  # so that no gradient comes any more
IS_SENT = (InBackward.SENT, InBackward.DONE)


class _Travel(NamedTuple):
    """A reduction that has begun.

    Attributes:
        is_synchronised: Whether no micro-batch follows the one that is being reduced.
        copies_differ: Whether it is the average over the ranks of one copy of the state, and one
            over the copies has to follow.
    """

    work: Pending | Exchange
    out: Tensor
    is_synchronised: bool
    copies_differ: bool = False


class FlatGradients:
    """The gradients beside one `FlatParameters`, as they arrive and travel.

    Args:
        groups: Groups of the data-parallel ranks, made for gradients.
        waits_for_end: Whether the reduction begins at the end of backward only.
        exchange: Averages gradients compressed; None sends them uncompressed.

    Attributes:
        accumulates: Whether gradients stay here until a backward that synchronises.
        is_owed: Whether gradients were accumulated that no reduction has taken, on any rank.
        came_twice: Whether this backward has brought a gradient in two parts.
    """

    def __init__(
        self,
        flat: FlatParameters,
        groups: DataGroups,
        *,
        waits_for_end: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self.flat = flat
        self.exchange = exchange
        self.waits_for_end = waits_for_end
        self.buffer = GradientBuffer(flat)
        self.states, self.accumulates = self.buffer.states, self.buffer.accumulates
        self.own = OwnGradients(self.buffer, groups.dp)
        self._in_order = exchange if isinstance(exchange, TreeExchange) else None
        self.reduce_over(groups)
        self.arrivals = Arrivals(flat.params)
        self._seen: dict[int, None] = {}  # arrived in this backward, in their order
        self._expected = 0  # of _seen; a lower bound while backward runs
        self._averages: dict[int, Tensor] = {}  # of full gradients, while others travel
        self._travel: _Travel | None = None
        self._sums: dict[int, Tensor] = {}  # of a pipeline's microbatches, before they are rounded
        self._added = b""  # which gradients earlier micro-batches have, where sums have one order
        self.state = InBackward.ARRIVING
        self.is_owed = self.came_twice = False

    def reduce_over(self, groups: DataGroups) -> None:
        """Average over other ranks from now on; nothing may be in flight."""
        self._groups, self.own.ranks = groups, groups.dp
        self._copies_differ = (  # what is averaged first is that of one copy; see `_Travel`
            self.flat.stage > 0 and groups.replicate is not None and self._in_order is None
        )

    def close(self) -> None:
        """Note that backward has left the unit's modules."""
        if self.state not in IS_LEFT:
            after = InBackward.DONE if self.state in IS_SENT else InBackward.LEFT
            self.state = self.state.to(after)

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now; frozen buffers cost nothing."""
        return self._num_trained > 0

    @property
    @as_they_are
    def _num_trained(self) -> int:
        return num_trained(self.flat.params)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter that can has had its gradient in this backward."""
        if self.state in IS_LEFT:
            return True
        if len(self._seen) + len(self.arrivals.waiting) < self._expected:
            return False
        self.accept_waiting()
        self._expected = self._num_trained
        return len(self._seen) >= self._expected

    @property
    @as_they_are
    def which_are_there(self) -> list[bool]:
        """Whether a gradient stands in `.grad` of each parameter on this rank."""
        return [grad is not None for grad in map(OWN_GRAD, self.flat.params)]

    @property
    def all_trained_are_used(self) -> bool:
        """Whether this rank has used every parameter that can have a gradient."""
        states = self.states
        if states.all_used:
            return True
        trained = map(or_, map(REQUIRES_GRAD, self.flat.params), states.was_trained)
        return all(map(or_, states.is_used, map(not_, trained)))

    @property
    def shows_no_averages(self) -> bool:
        """Whether no `.grad` looks like an average while micro-batches only add up."""
        return self.buffer.shows_sums or self._in_order is not None

    def note_accumulated(self) -> None:
        """Note that a backward has been added up only: what it had can be frozen in the next."""
        self.is_owed |= self.accumulates and self.is_trained
        self.states.note_trained(map(REQUIRES_GRAD, self.flat.params))

    @property
    def must_reduce(self) -> bool:
        """Whether the end of a backward still owes a reduction, whatever this rank's graph used."""
        if self.state in IS_SENT:
            return self.states.any_local and not self.accumulates
        return self.is_trained

    @unrecorded
    def take(self, index: int, grad: Tensor) -> None:
        """Take a gradient computed outside autograd's own pass, in the parameter's own shape."""
        self._expect(index)
        if self.flat.params[index].grad is self.buffer.views[index]:
            self.buffer.views[index].add_(grad)
            self.states.arrive(index)
        else:
            self.buffer.observe(index)
            grad = self._with_users(index, grad)
            self.buffer.store(index, grad)
            if self._in_order is not None and grad.dtype != self.buffer.views[index].dtype:
                self._sums[index] = grad
        self._seen[index] = None

    @as_they_are
    def _with_users(self, index: int, grad: Tensor) -> Tensor:
        """Return the sum of a gradient and the user's own in `.grad`, as autograd adds them."""
        own = OWN_GRAD(self.flat.params[index])
        if own is None or isinstance(own, AveragedGradient):
            return grad
        self.buffer.forget([index])
        return grad + (own.to_dense() if own.is_sparse else own).detach()

    def accept(self, index: int) -> None:
        """Take the gradient that autograd has just put on a parameter."""
        param = self.flat.params[index]
        if not param.requires_grad:  # frozen since its forward: autograd drops what has come
            return
        self.came_twice |= index in self._seen
        self._expect(index)
        grad = param.grad
        assert grad is not None
        if grad is self.buffer.views[index]:
            self.states.arrive(index)
        else:
            self.buffer.store(index, self._arrived(index, grad))
        if not self._seen:
            self.buffer.forget_absent()
            self.arrivals.begin()
        self._seen[index] = None

    @as_they_are
    def accept_waiting(self) -> None:
        """Take the gradients that have come since the last one was taken."""
        if not self.arrivals.waiting:
            return
        self.came_twice |= len({*self.arrivals.waiting}) < len(self.arrivals.waiting)
        indices = self.arrivals.take()
        params = [self.flat.params[index] for index in indices]
        grads = [*map(OWN_GRAD, params)]
        if self._are_ordinary(indices, params, grads):
            self.buffer.store_all(indices, cast("list[Tensor]", grads))
            self._seen.update(dict.fromkeys(indices))
            return
        for index in indices:
            self.accept(index)

    def _are_ordinary(
        self, indices: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> bool:
        """Whether gradients are tensors that autograd has just made, each for its first time."""
        if not self._seen.keys().isdisjoint(indices):
            return False
        if self.state in IS_SENT or self.buffer.must_set_aside:
            return False
        if {*map(type, grads)} != {Tensor} or num_trained(params) < len(params):
            return False
        made = cast("Sequence[Tensor]", grads)
        is_plain = not (any(map(REQUIRES_GRAD, made)) or any(map(IS_SPARSE, made)))
        return is_plain and self.states.are_none(indices)

    def _expect(self, index: int) -> None:
        if not self._seen:
            self.buffer.renew()
        if self.buffer.full is None:
            self.buffer.allocate()
        if self.state in IS_SENT and self.accumulates:
            raise ConfigError(
                f"Rank {self._groups.dp.rank}: the gradient of {self.own.name(index)!r} "
                f"arrived again after its unit had been reduced, expected one arrival per "
                f"backward. Use activation checkpointing with use_reentrant=False, or ZeRO stage 2 "
                f"or 3."
            )

    def _arrived(self, index: int, grad: Tensor) -> Tensor:
        """Return the gradient that has just come, taken from what stands in `.grad` now."""
        if isinstance(grad, AveragedGradient):
            self.buffer.observe(index)
            grad.leave_graph()
            grad = grad.note.take_arrival()
        elif not self.states.is_none(index):
            self.buffer.forget([index])  # `.grad` was None
        if grad.requires_grad:  # it is in a graph where backward creates one
            grad = grad.detach()
        return grad.to_dense() if grad.is_sparse else grad

    def averaged(self, index: int) -> Tensor:
        """Return this rank's elements of a gradient that has been averaged."""
        self.accept_waiting()
        self.buffer.observe(index)
        if self.states.is_local[index] or self._travel is not None or not self.buffer.average_views:
            raise ConfigError(
                f"Rank {self._groups.dp.rank}: the gradient of "
                f"{self.own.name(index)!r} is not averaged over the ranks now, "
                f"expected .grad to be read once a backward has ended and before it is zeroed. "
                f"Read it in on_after_backward or on_before_optimizer_step."
            )
        return self.buffer.kept(index)

    @unrecorded
    def take_average(self, index: int, shown: AveragedGradient, elements: Tensor) -> None:
        """Let a gradient have other elements on this rank, and `shown` stand for them."""
        self.buffer.hold(index, shown)
        self.averaged(index).copy_(elements)

    def begin_reduce(self, *, synchronised: bool = True) -> None:
        """Start averaging the full buffer over the ranks; each rank must call."""
        sent, groups = self._sent(synchronised=synchronised), self._groups
        if sent is None:
            return
        if self.flat.stage == 0:
            work, out = groups.dp.all_reduce(sent, "avg", async_op=True), sent
        else:
            out, sizes = self._target(sent.dtype), self.flat.layout.shard_numels
            work = groups.shard.reduce_scatter(out, sent, "avg", sizes=sizes, async_op=True)
        self._travel = _Travel(work, out, synchronised, self._copies_differ)

    @unrecorded
    def _sent(self, *, synchronised: bool) -> Tensor | None:
        """Return what a collective averages; None where an exchange of one's own has begun."""
        self.finish_reduce()
        self.accept_waiting()
        self.is_owed = False
        if self.state not in IS_SENT:
            after = InBackward.DONE if self.state in IS_LEFT else InBackward.SENT
            self.state = self.state.to(after)
        if not self._seen:  # else the first has done so
            self.buffer.renew()
        full = self.buffer.allocate()
        if self._in_order is not None:
            self._in_order.ends_step = synchronised
            self._show_added()
        self.own.send_along(self.buffer.observe_all())
        if self.buffer.is_plain:
            self.own.take_in()
        used = self._contributions()
        twice = any(map(and_, used, self.states.is_reduced))
        self._clear_unused(used)
        self.states.all_leave()
        if self._in_order is not None and not synchronised:
            self._note_added(used)
        if not self.accumulates:
            self.buffer.send_off()
        if self.exchange is not None and not self._passes(self.exchange, full, used, twice):
            out = full if self.flat.stage == 0 else self._target(self.flat.master_dtype)
            self.exchange.begin(self._unrounded(full), out, used)
            self._travel = _Travel(self.exchange, out, synchronised, self._copies_differ)
            return None
        sent = full.to(self.flat.reduce_dtype)
        if sent is not full:
            self.buffer.free_sent()
        return sent

    @unrecorded
    def add_in_order(self) -> None:
        """Where sums have one order, add what a backward has only accumulated to those before."""
        if self._in_order is None or not (self.accumulates and self.is_trained):
            return
        full = self.buffer.allocate()
        used = self._contributions()
        self._clear_unused(used)
        self._in_order.add(self._unrounded(full))
        self._note_added(used)
        self._show_nothing()

    def _note_added(self, used: Sequence[bool]) -> None:
        self._added = bytes(map(or_, self._added or bytes(len(used)), used))

    @as_they_are
    def _show_nothing(self) -> None:
        """Let parameters have no gradient while a step's sum is not that of all micro-batches."""
        self.states.all_leave()
        for param in self.flat.params:
            param.grad = None
        self.buffer.forget(range(len(self.states)))

    def _unrounded(self, full: Tensor) -> Tensor:
        """Return the buffer as it was added up, in another format than its own."""
        sums, self._sums = self._sums, {}
        if not sums:
            return full
        unrounded = full.float()
        views = full_views(unrounded, self.flat.layout)
        for index, one in sums.items():
            views[index].copy_(one)
        return unrounded

    def _show_added(self) -> None:
        """Let parameters that only earlier micro-batches have used have a gradient, of zeros."""
        for index, was_used in enumerate(self._added):
            if was_used and not self.states.is_local[index]:
                self.buffer.store(index, torch.zeros_like(self.buffer.views[index]))
        self._added = b""

    def _clear_unused(self, used: Sequence[bool]) -> None:
        for index in (index for index, is_used in enumerate(used) if not is_used):
            self.buffer.set_aside()
            self._keep_average(index)
            self.buffer.views[index].zero_()

    def _target(self, dtype: torch.dtype) -> Tensor:
        return self.buffer.target(dtype, travels_on=self._groups.replicate is not None)

    def _passes(self, exchange: Exchange, full: Tensor, used: Sequence[bool], twice: bool) -> bool:
        """Whether this reduction is dense, as during a compressor's warm-up."""
        by_steps = exchange.keeps_momentum or exchange.freezes_variance
        if by_steps and twice and not self.buffer.is_plain:
            advice = (
                "Let the Trainer accumulate them, accumulate_grad_batches=n"
                if self.accumulates
                else "Use strategy='zero1', which adds micro-batches up before they are sent, or "
                "accumulate_grad_batches=1"
            )
            raise ConfigError(
                f"Rank {self._groups.dp.rank}: a second gradient was reduced before the "
                f"optimizer's step, expected one: the compressor sends momentum or freezes Adam's "
                f"second moment, and would count every micro-batch as a step. {advice}."
            )
        exchange.was_dense = exchange.passes(full, used)
        return exchange.was_dense

    @property
    def sent_next(self) -> list[Tensor | None]:
        """This rank's gradient of each parameter that the next reduction sends, or None."""
        views = self.buffer.views  # none where this rank has used nothing of the buffer
        sent = enumerate(self._contributions())
        return [views[index] if is_sent else None for index, is_sent in sent]

    @unrecorded
    def continue_reduce(self) -> None:
        """Wait for the first half of a reduction that has two, and start the other; collective."""
        travel = self._travel
        if travel is not None and isinstance(travel.work, Exchange):
            travel.work.proceed()
        if travel is None or not travel.copies_differ:
            return
        assert self._groups.replicate is not None
        travel.work.wait()
        work = self._groups.replicate.all_reduce(travel.out, "avg", async_op=True)
        self._travel = _Travel(work, travel.out, travel.is_synchronised)

    def _contributions(self) -> list[bool]:
        """Return which gradients are this rank's part of an average."""
        if self.buffer.is_plain and self.exchange is None:  # averaged again to itself
            shown = zip(self.flat.params, self.buffer.views, strict=True)
            return [param.grad is view for param, view in shown]
        return list(map(bool, self.states.is_local))

    def _keep_average(self, index: int) -> None:
        """Set an average in `.grad` aside that must not travel again."""
        view = self.buffer.views[index]
        if self.buffer.is_plain and self.flat.params[index].grad is view:
            self._averages[index] = view.clone()

    @property
    def is_reduced_by_all(self) -> bool:
        """Whether `finish_reduce` returns at once: no half of a reduction is left to begin."""
        travel = self._travel
        if travel is None:
            return True
        work = travel.work
        return isinstance(work, Pending) and not travel.copies_differ and work.is_ready()

    @property
    def sends_twice(self) -> bool:
        """Whether the reduction that has begun has a second half over the same ranks."""
        work = None if self._travel is None else self._travel.work
        return isinstance(work, Exchange) and work.sends_twice

    @unrecorded
    def finish_reduce(self) -> None:
        """Wait for the average and add it to the local gradients."""
        self.continue_reduce()
        travel = self._travel
        if travel is None:
            return
        travel.work.wait()
        self._travel = None
        self.buffer.free_sent()
        if self._in_order is not None and not travel.is_synchronised:
            self._show_nothing()
            return
        if self.flat.stage == 0:
            full = self.buffer.allocate()
            if travel.out is not full:
                full.copy_(travel.out)
        else:
            self.buffer.merge(travel.out)
        self.buffer.add_what_was_set_aside()
        for index, average in self._averages.items():
            self.buffer.views[index].copy_(average)
        self._averages.clear()
        self.buffer.land(synchronised=travel.is_synchronised)
        self.states.all_come()
        self.buffer.release()
        self.own.know_content()

    def note_frozen(self) -> None:
        """Learn which gradients are gone where no reduction has asked: nothing is trained now."""
        if self.state not in IS_SENT and self.states.any_known:
            self.buffer.observe_all()

    def end_backward(self) -> None:
        """Forget which gradients this backward has brought."""
        self.arrivals.end([*self._seen])
        self._seen.clear()
        self.came_twice = False
        self._expected = self._num_trained
        if self.state is not InBackward.ARRIVING:
            self.state = self.state.to(InBackward.ARRIVING)

    @unrecorded
    def reduce_given(self, given: Sequence[bool]) -> None:
        """From stage 1 on, reduce gradients that user code put into `.grad`; collective."""
        for index, is_given in enumerate(given):
            if not is_given:
                continue
            grad, self.flat.params[index].grad = self.flat.params[index].grad, None
            self.buffer.forget([index])
            if grad is not None:
                grad = grad.detach()
                self.take(index, grad.to_dense() if grad.is_sparse else grad)
        self.begin_reduce()
        self.finish_reduce()
        self.end_backward()
        self.states.validate(given)
        self.buffer.settle()

    def buffers(self) -> list[Tensor]:
        """Return the tensors that hold gradient memory now, to be counted."""
        both = self.buffer.full, self.buffer.local
        own = [tensor for tensor in both if tensor is not None]
        return own if self.exchange is None else own + self.exchange.kept


def build_gradients(
    flats: Sequence[FlatParameters],
    wait_for_end: Collection[FlatParameters],
    reducing: DataGroups,
    options: EngineOptions,
    split: ModelSplit,
) -> list[FlatGradients]:
    """Make the gradients' buffers of all parameters that can have gradients."""
    made = [
        FlatGradients(
            flat,
            reducing_of(flat, reducing, split),
            waits_for_end=flat in wait_for_end,
            exchange=_exchange(flat, number, reducing, options, split),
        )
        for number, flat in enumerate(flats)
        if flat.full.is_floating_point() or flat.full.is_complex()
    ]
    for one in made:
        one.buffer.takes_sums = options.same_bits and bool(split.groups_of_layers)
    return made


def reducing_of(flat: FlatParameters, reducing: DataGroups, split: ModelSplit) -> DataGroups:
    """Return the ranks over which a buffer's gradients are averaged."""
    fewer = (one.reducing for one in split.fewer_ranks if flat.groups is one.data)
    return next(fewer, reducing)


def _exchange(
    flat: FlatParameters,
    number: int,
    reducing: DataGroups,
    options: EngineOptions,
    split: ModelSplit,
) -> Exchange | None:
    """Make the exchange that averages a buffer's gradients compressed; None without compression."""
    compressor = options.compression
    if compressor is not None:
        _refuse_compressed(compressor, flat, reducing, split)
    elif not options.same_bits:
        return None
    in_copy = compressor is not None and flat.stage > 0
    buffer = FlatBuffer(
        layout=flat.layout,
        ranks=reducing.shard if in_copy else reducing.dp,
        keeps_all=flat.stage == 0,
        number=number,
        device=flat.full.device,
        dense_itemsize=_dense_itemsize(flat, reducing.dp),
        loss_scale=options.loss_scale,
    )
    return TreeExchange(buffer, reducing) if compressor is None else compressor.exchange(buffer)


def _refuse_compressed(
    compressor: Compressor, flat: FlatParameters, reducing: DataGroups, split: ModelSplit
) -> None:
    if flat.full.is_complex() or split.groups:
        raise ConfigError(
            "Compression works on real gradients of full parameters that every data-parallel "
            "rank shares, not on complex ones, nor with tensor or pipeline parallel. Leave it out."
        )
    if reducing.replicate is not None and compressor.keeps:
        raise ConfigError(
            f"{type(compressor).__name__} keeps what it has not sent, which copies of the state "
            f"(hybrid sharding) would have to agree on; expected compression='int4', 'int8', "
            f"'bf16' or 'fp16', which keep nothing."
        )


def _dense_itemsize(flat: FlatParameters, ranks: Collectives) -> int:
    """Return the bytes of one gradient element when `FlatGradients` sends it uncompressed."""
    own, result = flat.reduce_dtype, flat.shard.dtype
    into = result if result == torch.float32 else own
    return ranks.dtype_on_the_wire(own, None if flat.stage == 0 else into).itemsize
