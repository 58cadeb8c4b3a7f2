"""The memory of the gradients of one flat buffer, and the tensors that stand in `.grad`.

    full     each rank's own gradients, or where each rank keeps the full average, that
    local    this rank's shard of the averages
    host     the same in host memory, under offload, once a backward has synchronised
    stash    what `local` held while `full`, of which it is a part, takes new gradients

Where each rank keeps the full average, the view of `full` is the parameter's `.grad`, elsewhere an
`AveragedGradient`. The buffer learns what user code has done to `.grad` when it looks there.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from operator import and_, is_, or_
from sys import getrefcount

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.memory.flat_memory import full_views
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.torch_private import are_held_alone, storage_uses
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.tensor_properties import (
    OWN_GRAD,
    SET_OWN_GRAD,
    addresses_of,
    unrecorded,
)

_YES = 1


class GradientStates:
    """Where each gradient of a buffer lies, and which ranks used its parameter, in buffer order.

        NONE ──arrive──> LOCAL ──leave──> NONE ──come──> REDUCED ──arrive──> BOTH ──leave──> REDUCED
                           any state ──forget──> NONE

        LOCAL      in the full buffer: this rank's own, not yet reduced
        REDUCED    in the shard: an average since the last zero_grad
        BOTH       an average in the shard, and in the full buffer what is to be added to it

    A gradient leaves the full buffer when its reduction begins, and comes to lie in the shard when
    it has ended. A buffer may have thousands of gradients, and most events are of all of them: so
    a state is one byte in each of a few arrays, and an event of all is one operation.

    Attributes:
        is_local: Whether some of the gradient is still to be reduced: LOCAL or BOTH.
        is_reduced: Whether some of the gradient has been reduced: REDUCED or BOTH.
        is_used: Whether this rank has used the parameter since the last zero_grad.
        is_valid: Whether any rank has used it, so that the optimizer sees a gradient.
        was_trained: Whether a micro-batch could use it of which ranks have not yet told each other.
    """

    def __init__(self, num_params: int) -> None:
        self.is_local = bytearray(num_params)
        self.is_reduced = bytearray(num_params)
        self.is_used = bytearray(num_params)
        self.is_valid = bytearray(num_params)
        self.was_trained = bytearray(num_params)
        self._all, self._none = bytes([_YES]) * num_params, bytes(num_params)

    def __len__(self) -> int:
        """Return the number of gradients."""
        return len(self._all)

    @property
    def any_local(self) -> bool:
        """Whether some of any gradient is still to be reduced."""
        return _YES in self.is_local

    @property
    def any_reduced(self) -> bool:
        """Whether an average of any gradient lies in the shard."""
        return _YES in self.is_reduced

    @property
    def any_known(self) -> bool:
        """Whether any parameter has been used by some rank, as far as is known here."""
        return _YES in self.is_used or _YES in self.is_valid

    def is_none(self, index: int) -> bool:
        """Whether there is no gradient, and has been none since `forget`."""
        somewhere = self.is_local[index] or self.is_reduced[index]
        return not (somewhere or self.is_used[index] or self.is_valid[index])

    def are_none(self, indices: Sequence[int]) -> bool:
        """Whether there is none of some gradients, and has been none since `forget`."""
        known = (self.is_local, self.is_reduced, self.is_used, self.is_valid)
        return not any(_YES in map(one.__getitem__, indices) for one in known)

    @property
    def all_reduced(self) -> bool:
        """Whether an average of every gradient lies in the shard."""
        return self.is_reduced == self._all

    @property
    def all_averaged(self) -> bool:
        """Whether the optimizer sees an average of every gradient."""
        return self.is_reduced == self._all and self.is_valid == self._all

    @property
    def all_used(self) -> bool:
        """Whether this rank has used every parameter."""
        return self.is_used == self._all

    @property
    def all_shown(self) -> bool:
        """Whether some rank has used every parameter, and this rank shows a gradient of each."""
        return self.is_valid == self._all and self._all in (self.is_used, self.is_reduced)

    def arrive(self, index: int) -> None:
        """Note that this rank has a new gradient."""
        self.is_local[index] = self.is_used[index] = _YES

    def all_arrive(self, indices: Iterable[int]) -> None:
        """Note that this rank has new gradients."""
        for index in indices:
            self.is_local[index] = self.is_used[index] = _YES

    def leave(self, index: int) -> None:
        """Note that nothing lies in the full buffer any more: the gradient was zeroed."""
        self.is_local[index] = 0

    def all_leave(self) -> None:
        """Note that the full buffer was sent."""
        self.is_local[:] = self._none

    def all_come(self) -> None:
        """Note that averages lie in the shard."""
        self.is_reduced[:] = self._all

    def show(self, index: int) -> None:
        """Note that an average lies in the shard, for every rank's optimizer to see."""
        self.is_reduced[index] = self.is_valid[index] = _YES

    def validate(self, flags: Sequence[int]) -> None:
        """Note which parameters some rank has used, beside those that are known to be."""
        self.is_valid[:] = bytes(map(or_, self.is_valid, flags))
        self.was_trained[:] = self._none

    def note_trained(self, flags: Iterable[bool]) -> None:
        """Note which parameters the ranks could use in a micro-batch that is only added up."""
        self.was_trained[:] = bytes(map(or_, self.was_trained, flags))

    def forget(self, indices: Iterable[int]) -> None:
        """Note that gradients are gone."""
        for index in indices:
            self.is_local[index] = self.is_reduced[index] = 0
            self.is_used[index] = self.is_valid[index] = 0


_OWN_REFERENCES = 2  # to a view that nobody else holds: that of the list, and getrefcount's own


class KeptAverages:
    """Knows whether others hold the memory of some averages.

    On one device zero_grad leaves the user the gradient, and backward makes a new one. Here an
    average comes to lie where the last one did, unless that is kept: then the engine goes on in new
    memory. Of a buffer where some are zeroed and some are not, this holds for the tensors that the
    optimizer saw, not for views that it has made of them.
    """

    def __init__(self) -> None:
        self._own_uses = 0

    def begin(self, memory: Tensor) -> None:
        """Note that memory is new: who holds it now, its views, will do so for good."""
        self._own_uses = storage_uses(memory)

    def are_there(self, memory: Tensor, views: list[Tensor]) -> bool:
        """Whether others hold averages, while these stand in no `.grad`."""
        return storage_uses(memory) > self._own_uses or not are_held_alone(views)


def moved_along(left: Sequence[Tensor], views: list[Tensor], stay: Collection[int]) -> list[Tensor]:
    """Return views of new memory, some of which are the tensors that have been seen."""
    for index in stay:
        left[index].data = views[index]
    return [left[index] if index in stay else view for index, view in enumerate(views)]


class KeptViews:
    """Keeps the views of one buffer while it is not needed, since making many anew takes long.

    needed       flat   [ v0 | v1 | v2 ]
    given back   ordinary memory   freed; the views keep their shapes and places
                 shared memory     idle; who needs memory there first takes it, and the views go
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._kept: tuple[Tensor, list[Tensor]] | None = None

    def keep(self, flat: Tensor, views: list[Tensor]) -> None:
        """Give the memory of a buffer back, which nobody reads any more, and keep its views."""
        self._kept = flat, views  # before others may ask for it
        if flat.untyped_storage().resizable():
            flat.untyped_storage().resize_(0)
        elif not self._ranks.set_aside(flat, self.let_go):
            self._kept = None

    def take(self) -> tuple[Tensor, list[Tensor]] | None:
        """Return the buffer with any content, and its views; None where there is none."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        if kept[0].untyped_storage().resizable():
            kept[0].untyped_storage().resize_(kept[0].nbytes)
        else:
            self._ranks.take_up(kept[0])
        return kept

    def let_go(self) -> None:
        """Keep nothing any longer."""
        self._kept = None


class HostGradients:
    """The host's side of one buffer of averages.

        micro-batch 1 ... k-1     reduced, and added up on the device
        micro-batch k             reduced, added, and copied down once, while backward goes on

    A backward after that, without `zero_grad` between (several `manual_backward` calls, say), is
    copied down as well, and added on the host.

    Attributes:
        tensor: Shape (S,): the averages that are on the host; None before the first.
        are_here: Whether what has been averaged since `zero_grad` is on the host.
    """

    def __init__(self, copier: HostCopier, views_of: Callable[[Tensor], list[Tensor]]) -> None:
        self._copier, self._views_of = copier, views_of
        self.tensor: Tensor | None = None
        self.views: list[Tensor] = []
        self.are_here = False
        self._kept = KeptAverages()

    def _part_from_kept(self, stay: Collection[int]) -> None:
        """Go on in new memory where others have kept averages that new ones would overwrite."""
        assert self.tensor is not None
        self._copier.finish()
        self.tensor = self._copier.empty(self.tensor).copy_(self.tensor)
        self.views = moved_along(self.views, self._views_of(self.tensor), stay)
        self._kept.begin(self.tensor)

    @torch.no_grad()
    def land(self, averages: Tensor, held: Sequence[bool]) -> None:
        """Copy averages (S,) down, adding to those held here since `zero_grad`, by parameter."""
        if self.tensor is None:
            self.tensor = self._copier.empty(averages)
            self.views = self._views_of(self.tensor)
            self._kept.begin(self.tensor)
        stay = {*compress(range(len(held)), held)} if self.are_here else set()
        if len(stay) < len(held) and self._kept.are_there(self.tensor, self.views):
            self._part_from_kept(stay)
        if not self.are_here or not any(held):
            self._copier.down(averages, self.tensor)
        else:
            come = self._views_of(self._copier.fetch(averages))
            for view, more, adds in zip(self.views, come, held, strict=True):
                view.add_(more) if adds else view.copy_(more)
        self.are_here = True

    def ready(self) -> list[Tensor]:
        """Return the view of each parameter's elements, once all copies are done."""
        self._copier.finish()
        return self.views

    def drop(self) -> None:
        """Let go of the averages and their memory."""
        self.tensor, self.views, self.are_here = None, [], False


class GradientBuffer:
    """Gradient memory beside one `FlatParameters`.

    Attributes:
        full: This rank's own gradients; None while there is no memory.
        local: This rank's shard of the averages.
        host: The averages in host memory; None without offload.
        accumulates: Whether gradients stay in `full` until a backward that synchronises.
        takes_sums: Whether what comes was added up in the format of a master copy.
        is_plain: Whether `.grad` stays a full gradient once it is an average.
        shows_sums: Whether `.grad` is a view of `full` while this rank adds up.
        sets_aside: Whether the averages lie in a part of `full`, which takes new gradients.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat
        self.states = GradientStates(len(flat.params))
        self.full: Tensor | None = None
        self.views: list[Tensor] = []
        self.local: Tensor | None = None
        self.local_views: list[Tensor] = []
        self.host: HostGradients | None = None
        if flat.host is not None:
            self.host = HostGradients(flat.host.copier, flat.shard_views)
        self.accumulates, self.takes_sums = flat.stage < 2, False
        self.is_plain = not flat.has_local_form
        self.shows_sums = self.is_plain
        self.sets_aside = self.accumulates and not self.is_plain
        self._stash: Tensor | None = None
        self._sent: tuple[Tensor, list[Tensor]] | None = None
        self._spare = KeptViews(flat.groups.shard)  # `full` until the next backward
        self._spare_local = KeptViews(flat.groups.shard)
        self._addresses: list[int] = []  # of the views
        self._own_uses = 0  # of the memory of `full`, by us
        self._kept = KeptAverages()

    @unrecorded
    def allocate(self) -> Tensor:
        """Return `full`, which has memory from now on."""
        if self.full is not None:
            return self.full
        is_wide = self.accumulates or self.takes_sums
        kind = self.flat.master_dtype if is_wide else self.flat.full.dtype
        kept = self._spare.take()
        if kept is not None and kept[0].dtype == kind:
            self.full, self.views = kept
        else:
            self.full = self.flat.memory.like(self.flat.full, kind)
            self.views = [view.detach() for view in full_views(self.full, self.flat.layout)]
        for start, stop in self.flat.layout.gaps:  # padding travels too: keep it zero
            self.full[start:stop].zero_()
        if self.accumulates and self.local is None:
            bounds = self.flat.layout.shard_bounds(self.flat.shard_index)
            self.local = self.full[slice(*bounds)]
            self.local_views = self.flat.shard_views(self.local)
        self._addresses = addresses_of(self.views)
        self._own_uses = storage_uses(self.full)
        if self.accumulates:
            self._kept.begin(self.full)
        return self.full

    def see_assigned(self) -> None:
        """Where user code has assigned `.grad.data`, know the tensor in `.grad` for the user's."""
        if self.full is None or not self.shows_sums:
            return
        addresses = addresses_of(self.views)
        if addresses == self._addresses:
            return
        for index, slot in enumerate(self.flat.layout.slots):
            if addresses[index] != self._addresses[index]:
                self.views[index] = self.full[slot.offset : slot.stop].view(slot.shape).detach()

    @as_they_are
    def renew(self) -> None:
        """Leave user code that has kept views of gradients that are gone the memory of these."""
        if self.full is None:
            return
        if self.sets_aside:
            self._part_from_kept()
        if not self.shows_sums:
            return
        shown = zip(self.flat.params, self.views, strict=True)
        if any(param.grad is view for param, view in shown):
            return
        if storage_uses(self.full) > self._own_uses:
            self.local, self.local_views = None, []
            self.full, self.views = None, []

    def _part_from_kept(self) -> None:
        """Go on in new memory where others have kept averages that new ones would overwrite."""
        if self.local is None or not self._kept.are_there(self.local, self.local_views):
            return
        stay = self._added_to
        if len(stay) == len(self.states):
            return
        if self.accumulates:
            assert self.full is not None
            self.full = self.flat.memory.copy(self.full)
            self.views = [view.detach() for view in full_views(self.full, self.flat.layout)]
            self.local = self.flat.own_part(self.full)
            self._addresses = addresses_of(self.views)
        else:
            self.local = self.local.clone()
        self.local_views = moved_along(self.local_views, self.flat.shard_views(self.local), stay)
        self._kept.begin(self.local)

    @property
    def _added_to(self) -> Collection[int]:
        """The parameters to whose averages new ones will be added."""
        if not self.accumulates:  # when those are sent
            return {*compress(range(len(self.states)), self.states.is_reduced)}
        grads = enumerate(map(OWN_GRAD, self.flat.params))
        return {index for index, grad in grads if isinstance(grad, AveragedGradient)}

    def send_off(self) -> None:
        """Let `full` be on its way, so that what comes meanwhile gets memory of its own."""
        assert self.full is not None
        self._sent = self.full, self.views
        self.full, self.views = None, []

    def free_sent(self) -> None:
        """Give back what was sent off, once nobody reads it any more, but keep its views."""
        sent, self._sent = self._sent, None
        if sent is not None and self.full is None:
            self._spare.keep(*sent)

    def target(self, dtype: torch.dtype, *, travels_on: bool) -> Tensor:
        """Return the tensor for a new average: `local`, or new memory when `local` is taken.

        It travels in `dtype`, and `travels_on` if it is sent again in that format.
        """
        if not self.accumulates:
            self._part_from_kept()
        local = self._allocate_local() if self.local is None else self.local
        fits = dtype == local.dtype or (local.dtype == torch.float32 and not travels_on)
        is_taken = not self.accumulates and self.states.any_reduced and not self.is_on_host
        if not fits or is_taken:
            return torch.empty_like(local, dtype=None if fits else dtype)
        return local

    def _allocate_local(self) -> Tensor:
        kept = self._spare_local.take()
        if kept is not None:
            self.local, self.local_views = kept
            return self.local
        shape, kind = self.flat.shard.shape, self.flat.master_dtype
        self.local = self.flat.full.new_empty(shape, dtype=kind)
        self.local_views = self.flat.shard_views(self.local)
        self._kept.begin(self.local)
        return self.local

    def hold(self, index: int, shown: AveragedGradient) -> None:
        """Make room for an average that user code has put into `.grad`, in place of what was."""
        self.flat.stand_ins.leave([index], self._copy_of_average)
        self.flat.stand_ins.adopt(index, shown)
        if not self.average_views:
            _ = self.allocate() if self.accumulates else self._allocate_local()
        self.states.leave(index)
        self.states.show(index)

    def store(self, index: int, grad: Tensor) -> None:
        """Put a gradient into `full`, or add it to an earlier micro-batch's; show it."""
        if self.states.is_local[index]:  # or reentrant checkpointing
            self.views[index].add_(grad)
        else:
            self.set_aside()
            _out_of_graphs([self.views[index]])
            self.views[index].copy_(grad)
        if self.shows_sums:
            self.flat.params[index].grad = self.views[index]
        else:
            self.flat.stand_ins.put([index])
        self.states.arrive(index)

    def store_all(self, indices: Sequence[int], grads: list[Tensor]) -> None:
        """Put the first gradients of parameters, dense and in no graph, into `full`, and show them.

        Their state is NONE, and nothing must be set aside for them.
        """
        views = [self.views[index] for index in indices]
        _out_of_graphs(views)
        torch._foreach_copy_(views, grads)
        if self.shows_sums:
            for index, view in zip(indices, views, strict=True):
                SET_OWN_GRAD(self.flat.params[index], view)
        else:
            self.flat.stand_ins.put(indices)
        self.states.all_arrive(indices)

    @property
    def is_unused(self) -> bool:
        """Whether no parameter has a gradient, on any rank as far as is known here."""
        states = self.states
        if states.any_known or states.any_reduced or states.any_local:
            return False
        return all(grad is None for grad in map(OWN_GRAD, self.flat.params))

    @property
    def must_set_aside(self) -> bool:
        """Whether averages lie in a part of `full` that new gradients overwrite."""
        return self.sets_aside and self.states.any_reduced

    @as_they_are
    def forget_absent(self) -> None:
        """Note that gradients are gone which stand in no `.grad` any more."""
        grads = enumerate(map(OWN_GRAD, self.flat.params))
        self.forget([index for index, grad in grads if grad is None])

    def give_up_zeroed(self) -> None:
        """Under stage 3, free averages' memory, which backward needs, where all are zeroed."""
        if self.local is None or not self.flat.reshards:
            return
        self.forget_absent()
        if self.states.any_reduced:
            return
        if not self._kept.are_there(self.local, self.local_views):
            self._spare_local.keep(self.local, self.local_views)
        self.local, self.local_views = None, []

    def set_aside(self) -> None:
        """Keep the averages that lie in a part of `full` before new gradients overwrite it."""
        if not self.must_set_aside:
            return
        if self._stash is not None or self.is_on_host:
            return
        self.observe_all()  # zero_grad has perhaps let go of all
        if self.states.any_reduced:
            assert self.local is not None
            self._stash = self.local.clone()

    def merge(self, average: Tensor) -> None:
        """Add new averages to those held; where none is held, or it was set aside, start anew."""
        if average is self.local:
            return
        if self.local is None:
            self.target(average.dtype, travels_on=True)
        assert self.local is not None
        adds = not self.accumulates and not self.is_on_host and self.states.any_reduced
        if not adds or self.states.all_reduced:
            self.local.add_(average) if adds else self.local.copy_(average)
            return
        shards = self.flat.shard_views(average)
        is_reduced = self.states.is_reduced
        for is_held, local, shard in zip(is_reduced, self.local_views, shards, strict=True):
            local.add_(shard) if is_held else local.copy_(shard)

    def add_what_was_set_aside(self) -> None:
        """Add the averages that `set_aside` has kept to the new ones."""
        if self._stash is None:
            return
        shards = self.flat.shard_views(self._stash)
        is_reduced = self.states.is_reduced
        for is_kept, local, shard in zip(is_reduced, self.local_views, shards, strict=True):
            if is_kept:
                local.add_(shard)
        self._stash = None

    @property
    def is_on_host(self) -> bool:
        """Whether the averages that are held lie in host memory."""
        return self.host is not None and self.host.are_here and self.states.any_reduced

    def land(self, *, synchronised: bool) -> None:
        """Once a reduction is over, under offload, let its averages follow those on the host.

        All go there if it is `synchronised`: no micro-batch follows.
        """
        if self.host is None or self.local is None:
            return
        if not (synchronised or self.is_on_host):
            self.host.are_here = False
            return
        self.host.land(self.local, list(map(bool, self.states.is_reduced)))
        if not self.accumulates:
            self.local, self.local_views = None, []

    def bring_down(self) -> None:
        """Under offload, let all averages lie in host memory, for an optimizer there."""
        if self.host is not None and self.states.any_reduced and not self.host.are_here:
            self.land(synchronised=True)

    def host_buffers(self) -> list[Tensor]:
        """Return the tensors that hold averages in host memory now, to be counted."""
        tensor = None if self.host is None else self.host.tensor
        return [] if tensor is None else [tensor]

    @property
    def average_views(self) -> list[Tensor]:
        """View of each average where it lies now; none without memory."""
        return self.host.ready() if self.host is not None and self.is_on_host else self.local_views

    def kept(self, index: int) -> Tensor:
        """Return the average of a gradient where it lies now."""
        kept = None if self._stash is None else self.flat.shard_views(self._stash)
        return (kept or self.average_views)[index]

    @as_they_are
    def observe(self, index: int) -> None:
        """Learn from `.grad` whether user code has zeroed the gradient."""
        self._observe(index, self.flat.params[index].grad)

    @as_they_are
    def observe_all(self) -> list[int]:
        """Learn from every `.grad` whether user code has zeroed the gradient."""
        grads = [*map(OWN_GRAD, self.flat.params)]
        if self.shows_sums and len(self.views) == len(grads) and all(map(is_, grads, self.views)):
            return []
        own = []
        self.forget([index for index, grad in enumerate(grads) if grad is None])
        for index, (grad, note) in enumerate(zip(grads, self.flat.stand_ins.notes, strict=True)):
            if isinstance(grad, AveragedGradient):
                is_as_made = grad.note is note and grad.own is None
                if note.zeroed or not is_as_made:
                    self._observe(index, grad)
            elif grad is not None and not self.shows_sums:
                own.append(index)
        return own

    def _observe(self, index: int, grad: Tensor | None) -> None:
        if grad is None:
            self.forget([index])
        elif isinstance(grad, AveragedGradient):
            grad.settle(self.flat.stand_ins.note(index))
            if grad.note.zeroed:
                grad.note.zeroed = False
                self.states.leave(index)
                if self.states.is_reduced[index]:
                    self.kept(index).zero_()

    def forget(self, indices: Sequence[int]) -> None:
        """Note that gradients are gone, also for user code that has kept a `.grad`."""
        for index in indices if self.shows_sums and self.views else ():
            if getrefcount(self.views[index]) > _OWN_REFERENCES:
                self._leave_to_user(index)
        self.flat.stand_ins.leave(indices, self._copy_of_average)
        self.states.forget(indices)

    def _copy_of_average(self, index: int) -> Tensor | None:
        """Return what user code finds in a stand-in that it has kept; None where nothing is."""
        states = self.states
        if not states.is_reduced[index] or states.is_local[index] or not self.average_views:
            return None
        kept = self.kept(index).clone()
        return kept.zero_() if self.flat.stand_ins.note(index).zeroed else kept

    @as_they_are
    def drop(self) -> None:
        """Let go of all gradients and their memory."""
        for param in self.flat.params:
            param.grad = None
        self.forget(range(len(self.states)))
        self.full, self.views, self._stash = None, [], None
        self._sent = None
        self._spare.let_go()
        self._spare_local.let_go()
        self.local, self.local_views = None, []
        if self.host is not None:
            self.host.drop()

    def _leave_to_user(self, index: int) -> None:
        """Let a gradient that user code has kept stay what it is, in memory of its own."""
        kept, slot = self.views[index], self.flat.layout.slots[index]
        assert self.full is not None
        self.views[index] = self.full[slot.offset : slot.stop].view(slot.shape).detach()
        kept.data = kept.data.clone()

    @as_they_are
    def release(self) -> None:
        """After a reduction, let `.grad` stand for averages, but for tensors that came since."""
        if self.is_plain:
            return
        grads = enumerate(map(OWN_GRAD, self.flat.params))
        self.flat.stand_ins.put([index for index, grad in grads if grad is None])

    @as_they_are
    def settle(self) -> None:
        """Once ranks agree on the used parameters, set each `.grad`, or None, alike on all."""
        if self.states.all_shown and not self.is_plain:
            return
        for index, param in enumerate(self.flat.params):
            is_valid = self.states.is_valid[index]
            if not is_valid and isinstance(param.grad, AveragedGradient):
                param.grad = None
                self.forget([index])
            elif is_valid and param.grad is None:
                self._show(index)

    def _show(self, index: int) -> None:
        """Let a gradient stand in `.grad`; of one that other ranks alone have used, this has 0."""
        if not self.is_plain:
            self.flat.stand_ins.put([index])
            return
        self.allocate()
        if not (self.states.is_local[index] or self.states.is_reduced[index]):
            self.views[index].zero_()
        self.flat.params[index].grad = self.views[index]

    def is_there(self, index: int) -> bool:
        """Whether the average of any rank's gradient lies here, or in other ranks' shards."""
        is_shown = self.states.is_reduced[index] and self.states.is_valid[index]
        return bool(is_shown and self.average_views)

    def presented(self) -> list[Tensor | None]:
        """Return this rank's shard of each gradient, or None when no rank used the parameter."""
        views = self.average_views
        if not views:
            return [None] * len(self.states)
        are_there = map(and_, self.states.is_reduced, self.states.is_valid)
        takes_empty = self.flat.stage == 0
        return [
            view if is_there and (takes_empty or view.numel()) else None
            for view, is_there in zip(views, are_there, strict=True)
        ]

    @as_they_are
    def take_back(self, outer: Sequence[Tensor | None]) -> list[Tensor | None]:
        """End the optimizer's view: keep what user code made of the presented gradients."""
        for index, (param, one) in enumerate(zip(self.flat.params, self.presented(), strict=True)):
            grad = param.grad
            if one is None or grad is one:
                continue
            if grad is None:
                self.forget([index])
            else:
                one.copy_(grad)
        return [
            grad if is_reduced or not isinstance(grad, AveragedGradient) else None
            for grad, is_reduced in zip(outer, self.states.is_reduced, strict=True)
        ]

    @as_they_are
    def restore(self, outer: Sequence[Tensor | None]) -> None:
        """Put back what `take_back` returned; parameters may have other shapes by now."""
        stood_in = [isinstance(grad, AveragedGradient) for grad in outer]
        for param, grad, is_stand_in in zip(self.flat.params, outer, stood_in, strict=True):
            param.grad = None if is_stand_in else grad
        self.flat.stand_ins.put(compress(range(len(outer)), stood_in))


def _out_of_graphs(views: Sequence[Tensor]) -> None:
    """Let go of the graphs by which hooks of the last step have added to gradients."""
    for view in views:
        if view.requires_grad:
            view.detach_()
