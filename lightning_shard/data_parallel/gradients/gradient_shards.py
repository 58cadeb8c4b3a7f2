"""The gradients of an engine as user code sees them between backward and the update.

    p.grad.norm() of the first parameter ──> the norms of all, in one collective call per group
    q.grad.norm() of the next            ──> known already, until a gradient changes

Ranks agree on what is known, because all of them see the same events: gradients that arrive,
operations on `.grad`, the optimizer's view.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.backends.streams import sent_up
from lightning_shard.core.layout import ShardSlice
from lightning_shard.core.tensor_calls import BY_OBJECT
from lightning_shard.data_parallel.content import agreed
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.model_split import (
    ModelSplit,
    beyond_shards,
    fewer_ranks_of,
    shards_over,
)
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.torch_private import storage_key, storage_uses
from lightning_shard.data_parallel.views.averaged_gradient import (
    AveragedGradient,
    GradientNote,
    gone,
)
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.sharded_tensor import (
    ShardedTensor,
    combine_norms,
    partial_norm,
)
from lightning_shard.errors import ConfigError


@dataclass(eq=False)
class _Lent:
    """Memory that user code was given.

    Attributes:
        shard: This rank's elements, with their spread.
        full: The memory: all elements.
        own: This rank's elements as they lay in the memory when it was last compared.
        is_by_address: Whether user code may know the address, and hold nothing.
        is_stale: Whether the shards have changed since.
    """

    shard: ShardedTensor
    full: Tensor
    own: Tensor
    is_by_address: bool
    is_stale: bool = False

    def take_back(self) -> None:
        """Write to the shard what user code has written to the memory."""
        own = self._cut()
        if not torch.equal(own.view(torch.uint8), self.own.view(torch.uint8)):
            self.shard.local.copy_(own.view(self.shard.local.shape))
            self.own = own.clone()
            self.shard.on_change()

    def renew(self, full: Tensor) -> None:
        """Let the memory have the elements as they are now."""
        if full is not self.full:
            self.full.copy_(full)
        self.own, self.is_stale = self._cut().clone(), False

    def _cut(self) -> Tensor:
        own = self.shard.spread.cut(self.full, self.shard.local)
        assert own is not None
        return own.reshape(-1).contiguous()


class LentMemory:
    """The memory of an engine's shards that user code was given and may write to.

    shard.numpy(), .data_ptr(), .untyped_storage() ──> memory of all elements, gathered now
    what is written there                          ──> back into the shards, with the next operation
                                                       or when a unit is unsharded
    the hook or step ends                          ──> the memory goes, unless user code holds it

    A shard has no memory of its own shape: files and arrays of it were garbage.
    """

    def __init__(self) -> None:
        self._lent: dict[tuple[int, int, int], _Lent] = {}

    @torch.no_grad()
    def of(self, shard: ShardedTensor, function: str) -> Tensor:
        """Return all elements in memory that stays as long as user code uses it; collective.

        What is known by its address is there for the next one to ask, so that rank 0 alone may
        write a file of tensors whose storages all ranks have compared, as Hugging Face's does.
        """
        known = self._lent.get(_key(shard))
        if known is not None and known.is_by_address and not known.is_stale:
            return known.full.view(shard.shape)
        full = shard.full_tensor().view(shard.spread.shape).contiguous()
        for key, lent in list(self._lent.items()):
            if not lent.is_by_address and storage_uses(lent.full) == 1:
                lent.take_back()
                del self._lent[key]
        fresh = _Lent(shard, full, full, is_by_address=False)
        lent = self._lent.setdefault(_key(shard), fresh)
        lent.renew(full)
        lent.is_by_address |= function not in BY_OBJECT
        return lent.full.view(shard.shape)

    @torch.no_grad()
    def take_back(self, shard: ShardedTensor) -> None:
        """Write to a shard what user code has written to memory of its elements."""
        lent = self._lent.get(_key(shard)) if self._lent else None
        if lent is not None:
            lent.take_back()

    @torch.no_grad()
    def take_all_back(self) -> None:
        """Write to all shards what user code has written."""
        for lent in self._lent.values():
            lent.take_back()

    def changed(self) -> None:
        """Take note that shards have changed, on all ranks alike."""
        for lent in self._lent.values():
            lent.is_stale = True

    @torch.no_grad()
    def end(self) -> None:
        """Write to all shards what user code has written, and let the memory go."""
        lent, self._lent = self._lent, {}
        for one in lent.values():
            one.take_back()


def _key(shard: ShardedTensor) -> tuple[int, int, int]:
    return id(shard.spread), storage_key(shard.local), int(shard.local.storage_offset())


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterSpread:
    """The spread of one parameter's gradient over ranks.

    Attributes:
        shape: Shape of the full gradient.
        shard_groups: Returns the groups over whose ranks the elements of this rank's part of the
            model lie.
        device: Device of this rank's elements.
        own_shape: Shape of the part that the ranks of `shard_groups` have together; None where
            this rank has no part of the parameter.
        bounds: First and one-past-last of this rank's elements in that part, flattened; None where
            this rank has all of it.
        cuts: The bounds of every rank of `shard_groups`.
        lent: The memory of shards that user code was given.
    """

    name: str
    shape: torch.Size
    param: nn.Parameter
    split: ModelSplit
    shard_groups: Callable[[], Sequence[Collectives]]
    device: torch.device
    own_shape: torch.Size | None
    bounds: tuple[int, int] | None
    cuts: Sequence[tuple[int, int]] = ()
    lent: LentMemory

    @property
    def places(self) -> Hashable:
        """What is equal, on all ranks or none, for tensors whose elements lie alike."""
        return tuple(self.cuts), self.split.placement(self.param)

    @property
    def groups(self) -> Sequence[Collectives]:
        """Groups over which partial results are combined, one after the other."""
        return (*self.shard_groups(), *self.split.groups_of(self.param))

    @property
    def num_elements(self) -> int:
        """Number of this rank's elements, whether a gradient is there or not."""
        if self.own_shape is None:
            return 0
        start, stop = self.bounds or (0, self.own_shape.numel())
        return stop - start

    @property
    def counts(self) -> bool:
        """Whether this rank's elements count, and are not also another rank's."""
        return self.split.counts(self.param)

    @property
    def counts_once(self) -> bool:
        """Whether this rank's elements count in a sum over all ranks that share the model."""
        own = self.split.groups_of(self.param)
        shard = () if self.bounds is None else self.shard_groups()
        beyond = beyond_shards(shard, self.split)
        others = [group for group in beyond if group not in own]
        return self.counts and all(group.rank == 0 for group in others)

    def cut(self, tensor: Tensor, local: Tensor) -> Tensor | None:
        """Return this rank's shard of a tensor that is full, as large as its part, or a shard."""
        if tensor.shape == local.shape and not self._is_ambiguous(local):
            return tensor
        if tensor.shape == self.shape:
            if self.own_shape is None:
                return tensor.new_empty(0)
            tensor = self.split.local(self.param, tensor)
        elif tensor.shape != self.own_shape:
            return None
        return tensor if self.bounds is None else tensor.reshape(-1)[slice(*self.bounds)]

    @as_they_are
    def own(self, tensor: Tensor) -> Tensor:
        """Return the part of a full tensor that belongs to this rank's part of the model."""
        if self.own_shape is None:
            return tensor.new_empty(self.param.shape)
        return self.split.local(self.param, tensor)

    def _is_ambiguous(self, local: Tensor) -> bool:
        """Whether a tensor of the shard's shape may be meant as a row for every row."""
        if self.bounds is None or len(self.shape) < 2 or local.numel() != self.shape[-1]:
            return False
        return bool(self.bounds[0] % self.shape[-1])

    @torch.no_grad()
    def join(self, local: Tensor) -> Tensor:
        """Return the full tensor of the ranks' parts; each rank must call."""
        local = local.to(self.device)
        own = local.clone()
        if self.own_shape is not None and self.bounds is not None:
            flags = local.dtype == torch.bool
            own = local.new_zeros(
                self.own_shape.numel(), dtype=torch.uint8 if flags else local.dtype
            )
            own[slice(*self.bounds)] = local
            for group in self.shard_groups():
                group.all_reduce(own, "sum").wait()
            own = own.view(self.own_shape).to(local.dtype)
        return self.split.full(self.param, own)


class GradientShards:
    """Lends the gradients of a model to user code, one parameter at a time.

    Attributes:
        num_changes: How often gradients have changed on this rank.

    Args:
        named_params: All parameters of the model, the same on every rank.
        shard_groups: Returns the groups over whose ranks the elements of gradients lie now.
        reduce_owed: Averages gradients that were only accumulated; each rank must call.
        all_ranks: Group over which gradients are averaged.
    """

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        named_params: Iterable[tuple[str, nn.Parameter]],
        split: ModelSplit,
        device: torch.device,
        shard_groups: Callable[[], Sequence[Collectives]],
        reduce_owed: Callable[[], None],
        all_ranks: Collectives,
        phases: Phases,
        lent: LentMemory,
    ) -> None:
        self._split, self._device = split, device
        self._all_ranks, self._phases = all_ranks, phases
        self._shard_groups, self.reduce_owed = shard_groups, reduce_owed
        self.lent = lent
        self.num_changes = 0
        self._known: tuple[int, dict[float, Tensor]] = (-1, {})
        places = {
            param: (one, index) for one in gradients for index, param in enumerate(one.flat.params)
        }
        self._sources = {
            param: self._source(number, name, param, places.get(param))
            for number, (name, param) in enumerate(named_params)
        }

    def _source(
        self, number: int, name: str, param: nn.Parameter, place: tuple[FlatGradients, int] | None
    ) -> "_Source":
        note, own_shape, bounds, cuts = GradientNote(name), None, None, []
        if place is not None:
            gradients, index = place
            flat = gradients.flat
            note, slot = flat.stand_ins.note(index), flat.layout.slots[index]
            own_shape = torch.Size(slot.shape)
            if flat.stage > 0:
                cuts = [
                    _bounds(flat.layout.shard_slice(slot, i)) for i in range(flat.layout.num_shards)
                ]
                bounds = cuts[flat.shard_index]
        shape = self._split.full_shapes.get(param, own_shape or param.shape)
        spread = ParameterSpread(
            name=name,
            shape=shape,
            param=param,
            split=self._split,
            shard_groups=partial(self._groups_now, param),
            device=self._device,
            own_shape=own_shape,
            bounds=bounds,
            cuts=cuts,
            lent=self.lent,
        )
        note.source = _Source(self, number, note, spread, place)
        return note.source

    def spread_of(self, param: nn.Parameter) -> ParameterSpread:
        """Return how a sharded parameter's elements, and its gradient's, are spread."""
        return self._sources[param].spread

    def note_of(self, param: nn.Parameter) -> GradientNote:
        """Return the note of the stand-ins of a parameter's gradient."""
        return self._sources[param].note

    def changed(self) -> None:
        """Forget the norms that are known, since gradients have changed, on all ranks alike."""
        self.num_changes += 1

    def forget(self) -> None:
        """Let go of the gradients' notes, at the end of a run."""
        for source in self._sources.values():
            source.note.source = None

    def ranks_of_operands(self, source: "_Source") -> Collectives | None:
        """Return the ranks that need equal operands; None where each has all of the gradient."""
        ranks = self._all_ranks
        groups = self._split.groups_of(source.spread.param)
        if source.place is not None and fewer_ranks_of(groups, self._split) is not None:
            ranks = source.place[0].own.ranks  # others have no part of it, and do not ask
        return ranks if self._shard_groups() and ranks.size > 1 else None

    def _groups_now(self, param: nn.Parameter) -> Sequence[Collectives]:
        """Return the groups over whose ranks the elements of this rank's part lie now."""
        if Phase.OVER in self._phases.open:
            raise ConfigError(
                "What was read of a parameter or a gradient in shards is used after its run, whose "
                "ranks have the rest of it; expected full tensors. Take them in a hook of the run, "
                "on_train_end say, with .full_tensor() on every rank."
            )
        return shards_over(self._split.groups_of(param), self._shard_groups(), self._split)

    def absent(self) -> list[nn.Parameter]:
        """Return the parameters that only other ranks of the model have."""
        return [param for param, source in self._sources.items() if source.place is None]

    def stand_in(self, param: nn.Parameter) -> AveragedGradient:
        """Return the tensor for the `.grad` of a parameter that only other ranks have."""
        return AveragedGradient(param, self._sources[param].note)

    def settle(self, params: Iterable[nn.Parameter]) -> None:
        """Take what user code has computed and put into `.grad` of parameters for their own."""
        for param in params:
            if isinstance(param.grad, AveragedGradient):
                param.grad.settle(self._sources[param].note)

    @as_they_are
    @torch.no_grad()
    def norms(self, order: float) -> Tensor:
        """Return the norm of every parameter's gradient, (P,), float64; each rank must call."""
        self.reduce_owed()
        partial = torch.stack([self._partial(source, order) for source in self._sources.values()])
        if self._known[0] != self.num_changes:
            self._known = self.num_changes, {}
        known = self._known[1]
        if order not in known:
            known[order] = combine_norms(partial, order, self._over_all)
        return known[order]

    def norm(self, number: int, order: float) -> Tensor:
        """Return the norm of one parameter's gradient, (), float64; each rank must call."""
        changes, known = self._known
        norms = known.get(order) if changes == self.num_changes else None
        return (self.norms(order) if norms is None else norms)[number]

    def _partial(self, source: "_Source", order: float) -> Tensor:
        grad = source.spread.param.grad
        if isinstance(grad, AveragedGradient):
            grad.settle(source.note)  # on every rank, so that all know the same norms
        if not (isinstance(grad, AveragedGradient) and source.spread.counts_once):
            return partial_norm(torch.empty(0), order).to(self._device)
        return partial_norm(source.local(), order).to(self._device)

    def _over_all(self, tensor: Tensor, op: ReduceOpName) -> Tensor:
        shard = self._shard_groups()
        for group in (*shard, *beyond_shards(shard, self._split)):
            group.all_reduce(tensor, op).wait()
        return tensor


def _bounds(shard_slice: ShardSlice) -> tuple[int, int]:
    return shard_slice.param_offset, shard_slice.param_stop


@dataclass(frozen=True, eq=False)
class _Source:
    """Gives access to the gradient of one parameter; see `GradientSource`.

    Attributes:
        number: Index of the parameter among all of the model.
        place: The gradient's buffer and index there; None where only other ranks have it.
    """

    shards: GradientShards
    number: int
    note: GradientNote
    spread: ParameterSpread
    place: tuple[FlatGradients, int] | None

    @as_they_are
    def local(self) -> Tensor:
        """Return this rank's elements of the gradient."""
        if self.place is None:
            return self.spread.param.data.new_empty(0)
        gradients, index = self.place
        return gradients.averaged(index)

    def sharded(self) -> ShardedTensor:
        """Return the gradient as a sharded tensor, which looks full."""
        self.shards.reduce_owed()
        local = self.local()
        norm = partial(self._norm, local)
        return ShardedTensor(local, self.spread, norm_of_all=norm, on_change=self.changed)

    @as_they_are
    def look(self, shown: AveragedGradient) -> None:
        """Learn from `.grad` whether user code has zeroed the gradient, which `shown` stood for."""
        if self.place is not None:
            gradients, index = self.place
            gradients.buffer.observe(index)
        elif self.spread.param.grad is not shown:  # as on the ranks that have elements
            shown.lose(self.local())

    def apart(self, local: Tensor) -> ShardedTensor:
        """Return a tensor of other elements that is spread as the gradient is."""
        return ShardedTensor(local, self.spread)

    def _norm(self, local: Tensor, order: float) -> Tensor:
        """Return the norm of the gradient's elements, unless others have come to their place."""
        if self.place is not None and self.local().data_ptr() != local.data_ptr():
            raise gone(self.note.param_name)
        return self.shards.norm(self.number, order)

    def take(self, shown: AveragedGradient, local: Tensor) -> None:
        """Let the gradient have other elements, also where it was None; `shown` stands for it."""
        if self.place is not None:
            gradients, index = self.place
            gradients.take_average(index, shown, local)
        self.changed()

    def changed(self) -> None:
        """Forget the norms of all gradients, since this one has changed."""
        self.shards.changed()

    def operand(self, tensor: Tensor, operation: str) -> Tensor:
        """Return an operand that is the same on all ranks of the gradient; each rank must call.

        A result of `torch.autograd.grad`, a rank's own, is averaged where it is added.
        """
        ranks, own_shape = self.shards.ranks_of_operands(self), self.spread.own_shape
        if ranks is None or own_shape is None:
            return tensor
        is_full = tensor.shape in (self.spread.shape, own_shape)
        # a rank's shard may be all of a parameter of one dimension: ranks agree what is meant; one
        # number is a factor for all of it, also where this rank's shard is one element
        may_be_shard = len(own_shape) == 1 and tensor.shape == (self.spread.num_elements,)
        if not is_full and (tensor.numel() == 1 or not may_be_shard):
            return tensor
        return agreed(
            tensor,
            ranks,
            device=self.spread.device,
            is_full=is_full,
            operation=operation,
            name=self.note.param_name,
        )


class AbsentGradients:
    """Shows in `.grad` of parameters that only other ranks have whether they have a gradient."""

    def __init__(
        self,
        shards: GradientShards,
        params: Sequence[nn.Parameter],
        split: ModelSplit,
        device: torch.device,
    ) -> None:
        self._shards, self._params, self._split, self._device = shards, params, split, device
        self._absent = shards.absent() if split.groups_of_layers else []
        self._hidden: Mapping[nn.Parameter, Tensor | None] = {}

    @as_they_are
    def agree(self) -> None:
        """After a backward, agree which gradients exist; each rank of the split must call."""
        if not self._split.groups_of_layers:
            return
        absent = set(self._absent)
        there = [p not in absent and p.grad is not None for p in self._params]
        flags = sent_up(torch.tensor(there, dtype=torch.uint8), self._device)
        for group in self._split.groups_of_layers:
            group.all_reduce(flags, "max").wait()
        present = dict(zip(self._params, flags.bool().tolist(), strict=True))
        for param in self._absent:
            if not present[param]:
                param.grad = None
            elif not (isinstance(param.grad, AveragedGradient) and param.grad.own is None):
                param.grad = self._shards.stand_in(param)  # else what is there stays

    def hide(self) -> None:
        """Hide the gradients that only other ranks have from this rank's optimizer."""
        self._shards.settle(self._absent)
        self._hidden = {param: param.grad for param in self._absent}
        for param in self._absent:
            param.grad = None

    def show(self) -> None:
        """Show the gradients that only other ranks have again, after `hide`."""
        for param, grad in self._hidden.items():
            param.grad = grad
        self._hidden = {}
        self._shards.changed()
