"""The gradients of one flat buffer: collected as backward makes them, reduced, kept in pieces.

    autograd ──copy──> full (views) ──reduce──> local (views) ──> the optimizer's `.grad`

    stage   full                          local
    0       kept; all-reduced in place    the same memory
    1       kept; reduced into own part   this rank's part of `full`
    2, 3    from the first gradient of a  memory of its own (1/N), reduced gradients are added
            backward to its reduction     to it at every backward
    With a master copy, stages 0 and 1 keep `full` in its format: micro-batches add up there.
    With compression an `Exchange` reduces, in two halves that begin where dense reductions do.
    Where the state has several copies, what is reduced into pieces is averaged over them, too.

A parameter's gradient is copied into its view once, when autograd hands it over. Where each rank
keeps the whole average, the view is the parameter's `.grad`, and later micro-batches accumulate
into it in place. Elsewhere a `ReducedGradient` stands in `.grad`: it takes later micro-batches,
tells of `zero_grad`, and looks as the whole gradient does.
"""

from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.compression.compressor import Exchange
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.flat_parameters import FlatParameters, full_views
from lightning_shard.data_parallel.reduced_gradient import ReducedGradient
from lightning_shard.data_parallel.sharded_parameter import as_they_are
from lightning_shard.errors import ConfigError

_OWN_REFERENCES = 2  # to a view that nobody else holds: that of the list, and getrefcount's own


class FlatGradients:
    """Gradient buffers beside one `FlatParameters`.

    Args:
        flat: The parameters.
        groups: The data-parallel ranks, over groups for gradients.
        reduce_dtype: Format in which gradients travel; None for that of `full`.
        waits_for_end: Reduce at the end of backward only.
        exchange: Averages compressed gradients; None sends them as they are.
    """

    def __init__(
        self,
        flat: FlatParameters,
        groups: DataGroups,
        reduce_dtype: torch.dtype | None,
        *,
        waits_for_end: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self.flat = flat
        self.exchange = exchange
        self.waits_for_end = waits_for_end
        self._groups = groups
        self._reduce_dtype = reduce_dtype or flat.full.dtype
        self._full: Tensor | None = None
        self._views: list[Tensor] = []
        self._local: Tensor | None = None
        self.local_views: list[Tensor] = []
        self.accumulates = flat.stage < 2  # in full, until a backward that synchronises
        self._is_plain = not flat.has_local_form  # `.grad` stays a whole gradient
        self.shows_sums = self._is_plain  # `.grad` is a view of full while this rank adds up
        self._fresh = [False] * len(flat.params)  # in full, not yet reduced
        self._seen: set[int] = set()  # arrived in this backward
        self._expected = 0  # of _seen; a lower bound while backward runs
        self._held = [False] * len(flat.params)  # in local, since the last zero_grad
        self.used = [False] * len(flat.params)  # by this rank, since the last zero_grad
        self.valid = [False] * len(flat.params)  # used by any rank: the optimizer sees a gradient
        self._stash: Tensor | None = None
        self._averages: dict[int, Tensor] = {}  # of whole gradients, while others travel
        self._pending: tuple[Pending | Exchange, Tensor] | None = None
        self._copies_differ = False  # pending is the average over one copy's ranks
        self.was_reduced = False  # in this backward
        self.is_closed = False  # backward has left its modules: nothing more will come
        self._version = 0  # of full, once it was reduced

    def reduce_over(self, groups: DataGroups) -> None:
        """Average over other ranks from now on; nothing may be in flight."""
        self._groups = groups

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now; frozen buffers cost nothing."""
        return any(param.requires_grad for param in self.flat.params)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter that can has had its gradient in this backward."""
        if self.is_closed:
            return True
        if len(self._seen) < self._expected:
            return False
        self._expected = sum(param.requires_grad for param in self.flat.params)
        return len(self._seen) >= self._expected

    @property
    def must_reduce(self) -> bool:
        """Whether the end of a backward still owes a reduction, whatever this rank's graph used."""
        late = self.was_reduced and any(self._fresh) and not self.accumulates
        return late or (not self.was_reduced and self.is_trained)

    @torch.no_grad()
    def take(self, index: int, grad: Tensor) -> None:
        """Take a gradient that has been computed aside, in the parameter's own shape."""
        if self._full is None:
            self._allocate()
        if self.was_reduced and self.accumulates:
            raise self._came_twice(index)
        param, view = self.flat.params[index], self._views[index]
        if param.grad is view:
            view.add_(grad)
        else:
            del view
            self.observe(index)
            self._store(self._views[index], grad, index)
            param.grad = self._views[index] if self.shows_sums else self.flat.stand_in(index)
        self._note(index)

    def _note(self, index: int) -> None:
        self._fresh[index] = True
        self._seen.add(index)
        self.used[index] = True

    def accept(self, index: int) -> None:
        """Take the gradient that autograd has just put on a parameter.

        Raises:
            ConfigError: It came twice in one backward, after the first was already reduced.
        """
        param = self.flat.params[index]
        if self._full is None:
            self._allocate()
        view = self._views[index]
        grad = param.grad
        assert grad is not None
        if self.was_reduced and self.accumulates:
            raise self._came_twice(index)
        if grad is not view:
            del view
            arrived = self._arrived(index, grad)
            self._store(self._views[index], arrived, index)
            param.grad = self._views[index] if self.shows_sums else self.flat.stand_in(index)
        self._note(index)

    def _arrived(self, index: int, grad: Tensor) -> Tensor:
        """The gradient that has just come, out of what stands in `.grad` now."""
        if isinstance(grad, ReducedGradient):
            self.observe(index)
            grad = grad.note.take_arrival()
        else:
            self._forget(index)  # `.grad` was None
        grad = grad.detach()  # it is in a graph where backward creates one
        return grad.to_dense() if grad.is_sparse else grad

    @as_they_are
    def observe(self, index: int) -> None:
        """Learn from `.grad` whether user code has zeroed the gradient."""
        grad = self.flat.params[index].grad
        if grad is None:
            self._forget(index)
        elif isinstance(grad, ReducedGradient):
            grad.settle(self.flat.note(index))
            if grad.note.zeroed:
                grad.note.zeroed = self._fresh[index] = False
                if self._held[index]:
                    self._kept(index).zero_()

    def _kept(self, index: int) -> Tensor:
        """What has been reduced of a gradient, where it lies now."""
        kept = None if self._stash is None else self.flat.shard_views(self._stash)
        return (kept or self.local_views)[index]

    def averaged(self, index: int) -> Tensor:
        """This rank's elements of a gradient that has been averaged.

        Raises:
            ConfigError: It has not been, or it is gone.
        """
        self.observe(index)
        if self._fresh[index] or self._pending is not None or not self.local_views:
            raise ConfigError(
                f"Rank {self._groups.everyone.rank}: the gradient of "
                f"{self.flat.layout.slots[index].name!r} is not averaged over the ranks now, "
                f"expected .grad to be read once a backward has ended and before it is zeroed. "
                f"Read it in on_after_backward or on_before_optimizer_step."
            )
        return self._kept(index)

    def _forget(self, index: int) -> None:
        if self.shows_sums and self._views and getrefcount(self._views[index]) > _OWN_REFERENCES:
            self._leave_to_user(index)
        self.flat.leave_stand_ins(index)
        self._held[index] = self.used[index] = self.valid[index] = self._fresh[index] = False
        self.flat.note(index).zeroed = False  # of a gradient that is gone

    def _leave_to_user(self, index: int) -> None:
        """Let a gradient that user code has kept stay what it is, in memory of its own."""
        kept, slot = self._views[index], self.flat.layout.slots[index]
        assert self._full is not None
        self._views[index] = self._full[slot.offset : slot.stop].view(slot.shape)
        kept.data = kept.data.clone()

    def _store(self, view: Tensor, grad: Tensor, index: int) -> None:
        if self._fresh[index]:  # an earlier micro-batch, or reentrant checkpointing
            view.add_(grad)
        else:
            self._keep_reduced_part()
            view.copy_(grad)

    def _came_twice(self, index: int) -> ConfigError:
        name = self.flat.layout.slots[index].name
        return ConfigError(
            f"Rank {self._groups.everyone.rank}: the gradient of {name!r} arrived again after its "
            f"unit had been reduced, expected one arrival per backward. Use activation "
            f"checkpointing with use_reentrant=False, or ZeRO stage 2 or 3."
        )

    def _keep_reduced_part(self) -> None:
        """Before new gradients overwrite `full`, set aside what was reduced into part of it."""
        if not self.accumulates or self._is_plain or self._stash is not None:
            return
        if any(self._held):
            for index in range(len(self._held)):  # zero_grad has perhaps let go of all
                self.observe(index)
        if any(self._held):
            assert self._local is not None
            self._stash = self._local.clone()

    @torch.no_grad()
    def _allocate(self) -> None:
        kind = self.flat.shard.dtype if self.accumulates else self.flat.full.dtype
        self._full = torch.empty_like(self.flat.full, dtype=kind)
        self._views = full_views(self._full, self.flat.layout)
        end = 0
        for slot in self.flat.layout.slots:  # padding travels too: keep it zero
            self._full[end : slot.offset].zero_()
            end = slot.stop
        self._full[end:].zero_()
        if self.accumulates and self._local is None:
            bounds = self.flat.layout.shard_bounds(self.flat.shard_index)
            self._local = self._full[slice(*bounds)]
            self.local_views = self.flat.shard_views(self._local)

    @torch.no_grad()
    def begin_reduce(self) -> None:
        """Start averaging `full` over the ranks; each rank must call."""
        self.finish_reduce()
        self.was_reduced = True
        if self._full is None:
            self._allocate()
        assert self._full is not None
        for index in range(len(self._views)):
            self.observe(index)
        if self._is_plain:
            self.take_in_own()
        used = [self._has_contribution(index) for index in range(len(self._views))]
        twice = any(new and held for new, held in zip(used, self._held, strict=True))
        for index, view in enumerate(self._views):
            if not used[index]:
                self._keep_reduced_part()
                self._keep_average(index)
                view.zero_()
        full = self._full
        self._fresh = [False] * len(self._fresh)
        if not self.accumulates:
            self._full, self._views = None, []
        if self.exchange is not None and not self._passes(self.exchange, full, used, twice):
            out = full if self.flat.stage == 0 else self._reduce_target(self.flat.shard.dtype)
            self.exchange.begin(full, out, used)
            self._pending = self.exchange, out
            return
        send = full.to(self._reduce_dtype)
        if self.flat.stage == 0:
            self._pending = self._groups.everyone.all_reduce(send, "avg", async_op=True), send
            return
        out = self._reduce_target(send.dtype)
        self._pending = self._groups.shard.reduce_scatter(out, send, "avg", async_op=True), out
        self._copies_differ = self._groups.replicate is not None

    def _passes(self, exchange: Exchange, full: Tensor, used: Sequence[bool], twice: bool) -> bool:
        """Whether this reduction is a dense one, of a warm-up."""
        by_steps = exchange.keeps_momentum or exchange.freezes_variance
        if by_steps and twice and not self._is_plain:
            advice = (
                "Let the Trainer accumulate them, accumulate_grad_batches=n"
                if self.accumulates
                else "Use strategy='zero1', which adds micro-batches up before they are sent, or "
                "accumulate_grad_batches=1"
            )
            raise ConfigError(
                f"Rank {self._groups.everyone.rank}: a second gradient was reduced before the "
                f"optimizer's step, expected one: the compressor sends momentum or freezes Adam's "
                f"second moment, and would count every micro-batch as a step. {advice}."
            )
        return exchange.passes(full, used)

    @torch.no_grad()
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

    def _has_contribution(self, index: int) -> bool:
        if self._is_plain and self.exchange is None:  # an average is averaged again to itself
            return self.flat.params[index].grad is self._views[index]
        return self._fresh[index]

    def _keep_average(self, index: int) -> None:
        """Where `.grad` holds an average that is not to travel again, set it aside."""
        if self._is_plain and self.flat.params[index].grad is self._views[index]:
            self._averages[index] = self._views[index].clone()

    def _reduce_target(self, dtype: torch.dtype) -> Tensor:
        """Where the average goes: straight into `local`, or beside it when something is there."""
        if self._local is None:
            self._local = torch.empty_like(self.flat.shard)
            self.local_views = self.flat.shard_views(self._local)
        widens = self._local.dtype == torch.float32 and self._groups.replicate is None
        fits = dtype == self._local.dtype or widens  # what travels on keeps the travel format
        if not fits or (any(self._held) and not self.accumulates):
            return torch.empty_like(self._local, dtype=None if fits else dtype)
        return self._local

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the average and add it to the local gradients."""
        if self._pending is None:
            return
        self.continue_reduce()
        pending, out = self._pending
        pending.wait()
        self._pending = None
        if self.flat.stage == 0:
            assert self._full is not None
            if out is not self._full:
                self._full.copy_(out)
        elif out is not self._local:
            if self._local is None:
                self._reduce_target(out.dtype)
            self._merge(self.flat.shard_views(out))
        if self._stash is not None:
            self._add_held(self.flat.shard_views(self._stash))
            self._stash = None
        for index, average in self._averages.items():
            self._views[index].copy_(average)
        self._averages.clear()
        self._held = [True] * len(self._held)
        self._release_grads()
        self.know_content()

    def _merge(self, pieces: list[Tensor]) -> None:
        """Add new pieces to those held; where nothing is held (or it was set aside) start anew."""
        for held, local, piece in zip(self._held, self.local_views, pieces, strict=True):
            local.add_(piece) if held and not self.accumulates else local.copy_(piece)

    def _add_held(self, pieces: list[Tensor]) -> None:
        for held, local, piece in zip(self._held, self.local_views, pieces, strict=True):
            if held:
                local.add_(piece)

    @as_they_are
    def _release_grads(self) -> None:
        """After a reduction, `.grad` stands for what lies in pieces."""
        if self._is_plain:
            return
        for index, param in enumerate(self.flat.params):
            if not isinstance(param.grad, ReducedGradient):
                param.grad = self.flat.stand_in(index)

    @as_they_are
    def settle(self) -> None:
        """Once ranks agree on what was used, let `.grad` be there or not, the same on all."""
        for index, param in enumerate(self.flat.params):
            if not self.valid[index] and isinstance(param.grad, ReducedGradient):
                param.grad = None
                self._forget(index)
            elif self.valid[index] and param.grad is None and self._is_plain:
                param.grad = self._views[index]

    def end_backward(self) -> None:
        """Forget which gradients this backward has brought."""
        self._seen.clear()
        self._expected = sum(param.requires_grad for param in self.flat.params)
        self.was_reduced = self.is_closed = False

    def is_there(self, index: int) -> bool:
        """Whether the average of any rank's gradient lies here, or in other ranks' pieces."""
        return self._held[index] and self.valid[index] and bool(self.local_views)

    def present(self, index: int) -> Tensor | None:
        """The local gradient that the optimizer sees, or None when no rank used the parameter."""
        if not self.is_there(index):
            return None
        local = self.local_views[index]
        return local if local.numel() or self.flat.stage == 0 else None

    @property
    def ranks(self) -> Collectives:
        """All ranks over which gradients are averaged."""
        return self._groups.everyone

    @property
    def num_params(self) -> int:
        """How many parameters there are."""
        return len(self.flat.params)

    def name(self, index: int) -> str:
        """The name of a parameter in the model."""
        return self.flat.layout.slots[index].name

    def know_content(self) -> None:
        """Take what lies in the buffer now for what all ranks have."""
        if self.flat.stage == 0 and self._full is not None:
            self._version = self._full._version

    @property
    def is_edited(self) -> bool:
        """Whether user code has changed gradients since, by a quick look at this rank."""
        if self.has_own:
            return True
        return (
            self.flat.stage == 0 and self._full is not None and self._full._version != self._version
        )

    @property
    def has_own(self) -> bool:
        """Whether a tensor of the user's stands in some `.grad`."""
        return any(self._is_own(index) for index in range(self.num_params))

    @property
    def which_are_there(self) -> list[bool]:
        """Under stage 0, which parameters have a gradient here; later stages have agreed."""
        return [param.grad is not None for param in self.flat.params if self.flat.stage == 0]

    def _is_own(self, index: int) -> bool:
        """Whether a tensor of the user's stands in `.grad`."""
        grad = self.flat.params[index].grad
        if grad is None or isinstance(grad, ReducedGradient):
            return False
        return not self._views or grad is not self._views[index]

    def kind(self, index: int) -> tuple[bool, bool]:
        """Whether a tensor of the user's stands in `.grad`, and whether one of ours does."""
        is_own = self._is_own(index)
        if is_own and self.flat.params[index].grad.shape != self.flat.layout.slots[index].shape:  # type: ignore[union-attr]
            raise self._set_by_hand(index)
        return is_own, not is_own and self.flat.params[index].grad is not None

    @property
    def held_everywhere(self) -> Tensor | None:
        """Under stage 0, the memory of all gradients; where there is none it is zero."""
        if self.flat.stage > 0 or self._full is None:
            return None
        for index, param in enumerate(self.flat.params):
            self.observe(index)
            if param.grad is None:
                self._views[index].zero_()
        return self._full

    @torch.no_grad()
    def take_in_own(self) -> None:
        """Under stage 0, let our memory hold what user code has put into `.grad`."""
        for index, param in enumerate(self.flat.params):
            if not self._is_own(index):
                continue
            grad, param.grad = param.grad, None
            assert grad is not None
            if self._full is None:
                self._allocate()
            self._views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
            self._fresh[index] = self.used[index] = True
            self._show_held(index)

    def _show_held(self, index: int) -> None:
        self._held[index] = self.valid[index] = True
        stand_in = None if self._is_plain else self.flat.stand_in(index)
        self.flat.params[index].grad = self._views[index] if stand_in is None else stand_in

    @torch.no_grad()
    def average_again(self, there: Sequence[bool]) -> None:
        """Under stage 0, average what lies here once more; each rank must call.

        Args:
            there: Which parameters have a gradient on any rank.
        """
        if self._full is None:
            self._allocate()
            assert self._full is not None
            self._full.zero_()
        self.ranks.all_reduce(self._full, "avg").wait()
        for index, is_there in enumerate(there):
            if is_there:
                self._show_held(index)
        self._fresh = [False] * len(self._fresh)
        self.know_content()

    @torch.no_grad()
    def reduce_own(self, own: Sequence[bool]) -> None:
        """From stage 1 on, reduce what user code has put into `.grad`; each rank must call.

        Args:
            own: Which parameters have such a gradient on any rank.
        """
        for index, is_own in enumerate(own):
            if not is_own:
                continue
            grad, self.flat.params[index].grad = self.flat.params[index].grad, None
            self._forget(index)
            if grad is not None:
                grad = grad.detach()
                self.take(index, grad.to_dense() if grad.is_sparse else grad)
        self.begin_reduce()
        self.finish_reduce()
        self.end_backward()
        self.valid = [a or b for a, b in zip(self.valid, own, strict=True)]
        self.settle()

    @as_they_are
    def check_outer(self, index: int, outer: Tensor | None) -> None:
        """See to what stands in `.grad` before the optimizer's view of it.

        Raises:
            ConfigError: User code has put a gradient of its own there.
        """
        self.observe(index)
        view = self._views[index] if self._views else None
        if outer is None or outer is view or isinstance(outer, ReducedGradient):
            return
        raise self._set_by_hand(index)

    def _set_by_hand(self, index: int) -> ConfigError:
        return ConfigError(
            f"Rank {self.ranks.rank}: .grad of {self.name(index)!r} was set by hand to what has "
            f"not the parameter's own shape, expected gradients to come from backward, which "
            f"averages them over the ranks. Call self.manual_backward(loss), or use "
            f"strategy='shard_ddp'."
        )

    @as_they_are
    def take_back(self, index: int, outer: Tensor | None) -> Tensor | None:
        """End the optimizer's view of one gradient: keep what user code made of it.

        Args:
            index: The parameter; its `.grad` is what was presented, or what replaced it.
            outer: What stood in `.grad` before.

        Returns:
            What is to stand there again.
        """
        presented, grad = self.present(index), self.flat.params[index].grad
        if presented is not None and grad is None:
            self._forget(index)
        elif presented is not None and grad is not None and grad is not presented:
            presented.copy_(grad)
        return outer if self._held[index] or not isinstance(outer, ReducedGradient) else None

    @as_they_are
    def restore(self, index: int, outer: Tensor | None) -> None:
        """Put back what `take_back` returned; the parameter may have another shape by now."""
        stand_in = isinstance(outer, ReducedGradient)
        self.flat.params[index].grad = self.flat.stand_in(index) if stand_in else outer

    def buffers(self) -> list[Tensor]:
        """The gradient memory held now, for accounting."""
        own = [tensor for tensor in (self._full, self._local) if tensor is not None]
        return own if self.exchange is None else own + self.exchange.kept
