"""The gradients of one flat buffer: collected as backward makes them, reduced, kept in shards.

    autograd ──copy──> full (views) ──reduce──> local (views) ──> the optimizer's `.grad`

    stage   full                          local
    0       kept; all-reduced in place    the same memory
    1       kept; reduced into own part   this rank's part of `full`
    2, 3    from the first gradient of a  memory of its own (1/N), reduced gradients are added
            backward to its reduction     to it at every backward
    With a master copy, stages 0 and 1 keep `full` in its format: micro-batches add up there.
    With compression an `Exchange` reduces, in two halves that begin where dense reductions do.
    Where the state has several copies, what is reduced into shards is averaged over them, too.

A parameter's gradient is copied into its view once, when autograd hands it over. Where it lies from
then on is its `GradientState`; the memory, and what stands in `.grad`, are those of a
`GradientBuffer`; here is when they arrive and travel.
"""

from collections.abc import Sequence
from operator import and_
from typing import cast

import torch
from torch import Tensor

from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.arrivals import Arrivals
from lightning_shard.data_parallel.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.compression.compressor import Exchange
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.gradient_buffer import GradientBuffer
from lightning_shard.data_parallel.gradient_state import GradientStates
from lightning_shard.data_parallel.own_gradients import OwnGradients
from lightning_shard.data_parallel.sharded_parameter import as_they_are
from lightning_shard.data_parallel.tensor_properties import (
    IS_SPARSE,
    OWN_GRAD,
    REQUIRES_GRAD,
    num_trained,
)
from lightning_shard.data_parallel.unrecorded import unrecorded
from lightning_shard.errors import ConfigError


class FlatGradients:
    """The gradients beside one `FlatParameters`, as they arrive and travel.

    Args:
        flat: The parameters whose gradients these are.
        groups: Groups of the data-parallel ranks, made for gradients.
        waits_for_end: Whether the reduction begins at the end of backward only.
        exchange: Averages gradients compressed; None sends them uncompressed.

    Attributes:
        buffer: The memory in which the gradients lie.
        states: States of the parameters' gradients, in buffer order.
        arrivals: Gradients that have come, and wait to be taken.
        own: The gradients that user code has made or edited.
        was_reduced: Whether a reduction has begun in this backward.
        is_owed: Whether gradients were accumulated that no reduction has taken, on any rank.
        is_closed: Whether backward has left the unit's modules, so that no gradient comes any
            more.
        is_synchronised: Whether no micro-batch follows the one that is being reduced.
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
        self.states: GradientStates = self.buffer.states
        self.own = OwnGradients(self.buffer, groups.dp)
        self._groups = groups
        self.arrivals = Arrivals(flat.params)
        self._seen: dict[int, None] = {}  # arrived in this backward, in their order
        self._expected = 0  # of _seen; a lower bound while backward runs
        self._averages: dict[int, Tensor] = {}  # of full gradients, while others travel
        self._pending: tuple[Pending | Exchange, Tensor] | None = None
        self._copies_differ = False  # pending is the average over one copy's ranks
        self.was_reduced = self.is_closed = self.is_owed = False
        self.is_synchronised = True

    def reduce_over(self, groups: DataGroups) -> None:
        """Average over other ranks from now on; nothing may be in flight."""
        self._groups, self.own.ranks = groups, groups.dp

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay here until a backward that synchronises."""
        return self.buffer.accumulates

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
        if self.is_closed:
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
        if self.states.all_used:
            return True
        used = zip(self.states.is_used, self.flat.params, strict=True)
        return all(is_used or not param.requires_grad for is_used, param in used)

    @property
    def must_reduce(self) -> bool:
        """Whether the end of a backward still owes a reduction, whatever this rank's graph used."""
        if self.was_reduced:
            return self.states.any_local and not self.accumulates
        return self.is_trained

    @unrecorded
    def take(self, index: int, grad: Tensor) -> None:
        """Take a gradient computed outside autograd's own pass, in the parameter's own shape.

        Raises:
            ConfigError: The gradient came twice in one backward, after the first was reduced.
        """
        self._expect(index)
        if self.flat.params[index].grad is self.buffer.views[index]:
            self.buffer.views[index].add_(grad)
            self.states.arrive(index)
        else:
            self.buffer.observe(index)
            self.buffer.store(index, self._with_users(index, grad))
        self._seen[index] = None

    @as_they_are
    def _with_users(self, index: int, grad: Tensor) -> Tensor:
        """Return the sum of a gradient and the user's own in `.grad`, in place of what was there.

        Autograd's own pass adds so by itself.
        """
        own = OWN_GRAD(self.flat.params[index])
        if own is None or isinstance(own, AveragedGradient):
            return grad
        self.buffer.forget([index])
        return grad + (own.to_dense() if own.is_sparse else own).detach()

    def accept(self, index: int) -> None:
        """Take the gradient that autograd has just put on a parameter.

        Raises:
            ConfigError: The gradient came twice in one backward, after the first was reduced.
        """
        param = self.flat.params[index]
        if not param.requires_grad:  # frozen since its forward: autograd drops what has come
            return
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
        is_first = len({*indices}) == len(indices) and self._seen.keys().isdisjoint(indices)
        if not is_first or self.was_reduced or self.buffer.must_set_aside:
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
        if self.was_reduced and self.accumulates:
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
        """Return this rank's elements of a gradient that has been averaged.

        Raises:
            ConfigError: The gradient has not been averaged, or is gone.
        """
        self.accept_waiting()
        self.buffer.observe(index)
        if (
            self.states.is_local[index]
            or self._pending is not None
            or not self.buffer.average_views
        ):
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

    @unrecorded
    def begin_reduce(self) -> None:
        """Start averaging the full buffer over the ranks; each rank must call."""
        self.finish_reduce()
        self.accept_waiting()
        self.was_reduced, self.is_owed = True, False
        if not self._seen:  # else the first has done so
            self.buffer.renew()
        full = self.buffer.allocate()
        self.own.send_along(self.buffer.observe_all())
        if self.buffer.is_plain:
            self.own.take_in()
        used = self._contributions()
        twice = any(map(and_, used, self.states.is_reduced))
        self._clear_unused(used)
        self.states.all_leave()
        if not self.accumulates:
            self.buffer.send_off()
        if self.exchange is not None and not self._passes(self.exchange, full, used, twice):
            out = full if self.flat.stage == 0 else self._target(self.flat.master_dtype)
            self.exchange.begin(full, out, used)
            self._pending = self.exchange, out
        else:
            send = full.to(self.flat.reduce_dtype)
            if send is not full:
                self.buffer.free_sent()
            self._send(send)

    def _clear_unused(self, used: Sequence[bool]) -> None:
        for index in (index for index, is_used in enumerate(used) if not is_used):
            self.buffer.set_aside()
            self._keep_average(index)
            self.buffer.views[index].zero_()

    def _send(self, send: Tensor) -> None:
        if self.flat.stage == 0:
            self._pending = self._groups.dp.all_reduce(send, "avg", async_op=True), send
            return
        out = self._target(send.dtype)
        sizes = self.flat.layout.shard_numels
        pending = self._groups.shard.reduce_scatter(out, send, "avg", sizes=sizes, async_op=True)
        self._pending = pending, out
        self._copies_differ = self._groups.replicate is not None

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
        sent = zip(self.buffer.views, self._contributions(), strict=True)
        return [view if is_sent else None for view, is_sent in sent]

    @unrecorded
    def continue_reduce(self) -> None:
        """Start the second half of a compressed reduction, or of one over several copies.

        Each rank must call, in the order of `begin_reduce`; waits for the first half.
        """
        if self._pending is not None and isinstance(self._pending[0], Exchange):
            self._pending[0].proceed()
        if not self._copies_differ:
            return
        assert self._pending is not None
        assert self._groups.replicate is not None
        pending, out = self._pending
        pending.wait()
        self._pending = self._groups.replicate.all_reduce(out, "avg", async_op=True), out
        self._copies_differ = False

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
        if self._pending is None:
            return True
        pending, _ = self._pending
        return isinstance(pending, Pending) and not self._copies_differ and pending.is_ready()

    @unrecorded
    def finish_reduce(self) -> None:
        """Wait for the average and add it to the local gradients."""
        if self._pending is None:
            return
        self.continue_reduce()
        pending, out = self._pending
        pending.wait()
        self._pending = None
        self.buffer.free_sent()
        if self.flat.stage == 0:
            full = self.buffer.allocate()
            if out is not full:
                full.copy_(out)
        else:
            self.buffer.merge(out)
        self.buffer.add_what_was_set_aside()
        for index, average in self._averages.items():
            self.buffer.views[index].copy_(average)
        self._averages.clear()
        self.buffer.land(synchronised=self.is_synchronised)
        self.states.all_come()
        self.buffer.release()
        self.own.know_content()

    def note_frozen(self) -> None:
        """Learn which gradients are gone where no reduction has asked: nothing is trained now."""
        if not self.was_reduced and self.states.any_known:
            self.buffer.observe_all()

    def settle(self) -> None:
        """Once ranks agree on what was used, let `.grad` be there or not, the same on all."""
        self.buffer.settle()

    def end_backward(self) -> None:
        """Forget which gradients this backward has brought."""
        self.arrivals.end([*self._seen])
        self._seen.clear()
        self._expected = self._num_trained
        self.was_reduced = self.is_closed = False

    @unrecorded
    def reduce_given(self, given: Sequence[bool]) -> None:
        """From stage 1 on, reduce gradients that user code put into `.grad`; each rank must call.

        Args:
            given: Whether each parameter has such a gradient on any rank.
        """
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
        self.settle()

    def buffers(self) -> list[Tensor]:
        """Return the tensors that hold gradient memory now, to be counted."""
        both = self.buffer.full, self.buffer.local
        own = [tensor for tensor in both if tensor is not None]
        return own if self.exchange is None else own + self.exchange.kept
