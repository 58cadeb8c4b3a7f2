"""The gradients of an engine as user code sees them between backward and the update.

    p.grad.norm() of the first parameter ──> the norms of all, in one collective call per group
    q.grad.norm() of the next            ──> known already, until a gradient changes

Ranks agree on what is known, because all of them see the same events: gradients that arrive,
operations on `.grad`, the optimizer's view.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.backends.streams import sent_up
from lightning_shard.core.layout import ShardSlice
from lightning_shard.data_parallel.content import agreed
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.model_split import (
    ModelSplit,
    beyond_shards,
    fewer_ranks_of,
    shards_over,
)
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.views.averaged_gradient import (
    AveragedGradient,
    GradientNote,
    gone,
)
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.sharded_tensor import (
    LentMemory,
    ShardedTensor,
    Spread,
    combine_norms,
    partial_norm,
)
from lightning_shard.errors import ConfigError


class GradientShards:
    """Lends the gradients of a model to user code, one parameter at a time.

    Attributes:
        num_changes: How often gradients have changed on this rank.

    Args:
        named_params: All parameters of the model, the same on every rank.
        shard_groups: Returns the groups over whose ranks the elements of gradients lie now.
        reduce_owed: Averages gradients that were only accumulated; each rank must call.
        all_ranks: Group over which gradients are averaged.
        reduces_full: Whether sums and norms are those of full tensors, to the bit.
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
        *,
        reduces_full: bool = False,
    ) -> None:
        self._split, self._device, self._reduces_full = split, device, reduces_full
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
        spread = Spread(
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
            reduces_full=self._reduces_full,
        )
        note.source = _Source(self, number, note, spread, place)
        return note.source

    def spread_of(self, param: nn.Parameter) -> Spread:
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
        here = self._split.is_here  # integers that are here have no place among gradients, either
        return [one for one, source in self._sources.items() if not (source.place or here(one))]

    def stand_in(self, param: nn.Parameter) -> AveragedGradient:
        """Return the tensor for the `.grad` of a parameter that only other ranks have."""
        return AveragedGradient(param, self._sources[param].note)

    def averaged_gradient_for(self, param: nn.Parameter, full: Tensor) -> AveragedGradient:
        """Return the tensor for the `.grad` of a parameter that is to have this full gradient."""
        source = self._sources[param]
        own, bounds = source.spread.own(full), source.spread.bounds
        local = own if bounds is None else own.reshape(-1)[slice(*bounds)]
        return AveragedGradient(param, source.note, source.apart(local))

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
    spread: Spread
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
