"""One flat buffer of parameters: the module's parameters are views into it.

A parameter can show itself in two ways, and `param.data` is pointed at one or the other:

    full     its own shape, a view of `full`         forward and backward
    local    1-D, this rank's shard, a view of       the optimizer; under stage 3 also whatever
             `shard`                                 happens between the steps

    stage 0, 1, 2     full   [ rank 0 | rank 1 | rank 2 ]     shard = this rank's part of it
    stage 3           full   storage freed when not in use    shard = memory of its own
    once per host     full   one copy, edits are each rank's  shard = this rank's part of it
    low precision     full   in the compute format            shard = memory of its own (master)
    few bits gathered full   what the shards were rounded to  shard = memory of its own (master)
    offload           shard as without; the optimizer's is `host`, and the shard itself where the
                      device keeps none

Resharding resizes the storage of `full` to zero and unsharding gives it back, so that views which
autograd has saved stay valid. While it is resharded, no parameter points at it. Where user code
holds it, by `w.detach()` say, it stays in memory: it shows the elements that it has until it is
unsharded again, and what is written to it meanwhile goes to the shard. What user code has pointed
`param.data` at is taken over before a parameter shows another view, and before anything reads the
buffers.

For averages in shards a tensor stands in `.grad` for each shape, format and device in which a
parameter shows itself; they share a note, and one that nobody has kept stands for the next, too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import lcm
from sys import getrefcount
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import CommonBuffer
from lightning_shard.backends.pending import Pending
from lightning_shard.core.layout import (
    FlatLayout,
    OwnedLayout,
    build_layout,
    build_owned_layout,
)
from lightning_shard.core.tensor_calls import SET_OWN_DATA
from lightning_shard.data_parallel.compression.quantized_gather import (
    QuantizedArrival,
    QuantizedGather,
    ShardCodec,
)
from lightning_shard.data_parallel.content import sum_of_bits
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.memory.assigned import (
    ShownViews,
    refuse_moved,
    refuse_shape,
)
from lightning_shard.data_parallel.memory.flat_memory import (
    FlatMemory,
    MemoryHolders,
    full_views,
    overwrite,
    shard_views,
)
from lightning_shard.data_parallel.memory.secondary_shard import SecondaryShard
from lightning_shard.data_parallel.offload.copier import HostCopier, HostShard, Uploaded
from lightning_shard.data_parallel.torch_private import exchange_contents, has_gradient_hooks
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient, GradientNote
from lightning_shard.data_parallel.views.sharded_parameter import (
    ParameterHome,
    as_they_are,
    move_out,
    present,
    settle_in,
)
from lightning_shard.data_parallel.views.tensor_properties import (
    OWN_GRAD,
    SET_OWN_GRAD,
    unrecorded,
)
from lightning_shard.errors import ConfigError

_Form = tuple[torch.Size, torch.dtype, torch.device]
_OWN_REFERENCES = 2  # to a stand-in that nobody else holds: that of the dict, and getrefcount's own
ALIGN_BYTES = 16  # vectorised kernels want it


class StandIns:
    """The stand-ins of one buffer."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._params = params
        self.notes = [GradientNote(name) for name in names]
        self._made: list[dict[_Form, AveragedGradient]]
        self._made = [{} for _ in names]

    def note(self, index: int) -> GradientNote:
        """Return the note that the stand-ins of a parameter's gradient share."""
        return self.notes[index]

    @as_they_are
    def put(self, indices: Iterable[int]) -> None:
        """Let stand-ins be the `.grad` of parameters whose gradients have been reduced."""
        for index in indices:
            param, made = self._params[index], self._made[index]
            form = param.shape, param.dtype, param.device
            stand_in = made.get(form)
            if stand_in is None:
                stand_in = made[form] = AveragedGradient(param, self.notes[index])
            SET_OWN_GRAD(param, stand_in)

    def adopt(self, index: int, shown: AveragedGradient) -> None:
        """Let what user code has put into `.grad` be a stand-in."""
        with torch._C.DisableTorchFunctionSubclass():
            self._made[index][shown.shape, shown.dtype, shown.device] = shown

    @as_they_are
    def lift(self, indices: Sequence[int]) -> list[int]:
        """Take stand-ins out of `.grad` while their parameters come to show other shapes."""
        grads = [*map(OWN_GRAD, map(self._params.__getitem__, indices))]
        if AveragedGradient not in map(type, grads):
            return []
        lifted = []
        for index, grad in zip(indices, grads, strict=True):
            if isinstance(grad, AveragedGradient):
                note = self.notes[index]
                if grad.note is not note or grad.own is not None:
                    grad.settle(note)
                SET_OWN_GRAD(self._params[index], None)
                lifted.append(index)
        return lifted

    def leave(self, indices: Iterable[int], elements: Callable[[int], Tensor | None]) -> None:
        """Note that gradients are gone: code that has kept a `.grad` has a copy, or nothing."""
        for index in indices:
            made = self._made[index]
            for form in list(made):
                if getrefcount(made[form]) > _OWN_REFERENCES:
                    made.pop(form).lose(elements(index))
            self.notes[index].zeroed = False  # of a gradient that is gone


class ValuesAtStart(Protocol):
    """Knows the values of parameters that are on meta."""

    device: torch.device

    def fill(self, param: nn.Parameter, target: Tensor) -> None:
        """Write the values of `param` to a tensor of its shape, in any format."""


def put_values(
    params: Iterable[nn.Parameter], targets: Iterable[Tensor], start: ValuesAtStart | None
) -> None:
    """Write parameters' values to tensors of their shapes, in any format."""
    for param, target in zip(params, targets, strict=True):
        if not param.is_meta:
            target.copy_(param.data)
        elif start is not None:
            start.fill(param, target)


def give_memory(param: nn.Parameter, value: Tensor) -> None:
    """Let a parameter on meta lie in memory; it stays the same object, with all that is set on it.

    Raises:
        ConfigError: Something refers to the parameter in a way that does not allow it.
    """
    if has_gradient_hooks(param):
        raise ConfigError(
            f"A parameter on meta of shape {tuple(param.shape)} has a hook, which would be lost "
            f"when it gets its values; expected none. Register it in on_fit_start or later."
        )
    made = nn.Parameter(value.new_empty(0), requires_grad=param.requires_grad)
    try:
        exchange_contents(param, made)
    except RuntimeError as error:
        raise ConfigError(
            f"A parameter on meta of shape {tuple(param.shape)} cannot be given its values, since "
            f"a graph refers to it; expected modules and optimizers alone. Compute with it in "
            f"on_fit_start or later."
        ) from error
    param.data = value  # and counts its changes by itself


@unrecorded
def first_values(
    params: Sequence[nn.Parameter],
    layout: FlatLayout,
    groups: DataGroups,
    *,
    stage: int,
    compute_dtype: torch.dtype,
    shard_index: int,
    copier: HostCopier | None,
    keeps_shard: bool,
    is_apart: bool,
    start: ValuesAtStart | None,
) -> tuple[Tensor, Tensor, HostShard | None, CommonBuffer | None]:
    """Lay out rank 0's values on every rank, as `full`, `shard`, `host` and `common`; collective.

    `is_apart` says that the full parameters will have other digits than the shards.

    the parameters exist     once per host        on every rank            under offload
    shard                    a part of them       a part, or its own       on the host, or both
    """
    like, bounds = params[0], layout.shard_bounds(shard_index)  # it may have no elements
    memory, is_plain, reshards = FlatMemory(groups.shard), compute_dtype == like.dtype, stage == 3
    stays, device = not reshards and is_plain, like.device if start is None else start.device
    make = partial(memory.zeros, like) if stays else like.new_zeros
    staging = make(layout.full_numel, dtype=like.dtype, device=device)
    if groups.dp.rank == 0:  # the others' are not read
        put_values(params, full_views(staging, layout), start)
    groups.dp.broadcast(staging, src=0).wait()
    part = slice(*bounds)
    own = staging[part]
    if stage > 0 and is_plain and copier is None and not is_apart:
        common = groups.shard.share(staging, *bounds)
        if common is not None:
            return common.tensor, common.tensor[part], None, common
    full = staging.to(compute_dtype) if stays or reshards else memory.copy(staging, compute_dtype)
    if copier is None:
        return full, own if stays and not is_apart else memory.copy(own), None, None
    host = HostShard(own, copier)
    if not keeps_shard:
        return full, host.tensor, host, None
    shard = own.clone() if reshards or is_apart else full[part]
    host.know(shard)
    return full, shard, host, None


def _laid_out(
    shapes: Sequence[tuple[str, tuple[int, ...]]], owners: Sequence[int], **sizes: int
) -> FlatLayout:
    """Return a layout that is cut evenly, or between parameters that have owners."""
    if owners:
        return build_owned_layout(shapes, owners, **sizes)
    return build_layout(shapes, **sizes)


class FlatParameters:
    """The parameters of one unit that share format and `requires_grad`.

    Args:
        named_params: Name and parameter in buffer order; all of one dtype and device. Rank 0's
            values are taken by every rank.
        groups: The data-parallel ranks, each of which must construct this.
        compute_dtype: Format of the full parameters in forward and backward, until `gather_in`.
        reduce_dtype: Format in which their gradients travel; None for that of the full parameters.
        is_split: Whether some of the parameters are tensor-parallel parts, or other ranks of the
            model have other parameters. Even the full gradients here are then not the model's, and
            are shown to the optimizer alone.
        owners: Rank of the shard group that has each parameter full, in ascending order; none for
            parameters that are cut evenly.
        keeps_shard: Whether the device keeps a shard beside that on the host.
        start: Knows the values of parameters on meta, which get memory here.
        align_bytes: Parameters and shards begin at multiples of this.
        gathers_in: Makes shards smaller that travel; None sends them as full parameters are.
        block_size: Shards, and parameters, begin at multiples of so many elements.

    Attributes:
        stand_ins: What stands in `.grad` for averages that lie in shards.
        host: The optimizer's shard in host memory; None without offload.
        common: The full parameters where they exist once per host, of which `shard` is a part under
            every stage; None where each rank has its own.
        compute_dtype: Format in which autocast's regions use the full parameters.
        master_dtype: Format of the shard that the optimizer updates.
        master_views: View of each parameter's elements in that shard.
        left: This rank's elements of the full memory when it was left to user code that holds it,
            shape (S,); None while it is unsharded or freed.
        secondary: This rank's part of a second copy in its node; None where there is none.
        on_assigned: Called when a parameter shows a tensor that user code has assigned; must adopt
            the value.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        groups: DataGroups,
        *,
        stage: int,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype | None = None,
        is_split: bool = False,
        owners: Sequence[int] = (),
        copier: HostCopier | None = None,
        keeps_shard: bool = True,
        start: ValuesAtStart | None = None,
        align_bytes: int = ALIGN_BYTES,
        gathers_in: ShardCodec | None = None,
        block_size: int = 1,
    ) -> None:
        self.params = [param for _, param in named_params]
        self.stage, self.reduce_dtype = stage, reduce_dtype or compute_dtype
        self.compute_dtype = compute_dtype
        self.groups, self.memory = groups, FlatMemory(groups.shard)
        self.master_dtype = master_dtype = self.params[0].dtype
        self._is_here = True  # of parameters in common, which have memory at all times
        self.is_away, self.is_split = copier is not None and not keeps_shard, is_split
        self.shard_index = groups.shard.rank if stage > 0 else 0
        shapes = [(name, tuple(param.shape)) for name, param in named_params]
        num_shards = groups.shard.size if stage > 0 else 1
        align = max(align_bytes // min(compute_dtype.itemsize, master_dtype.itemsize), 1)
        gathers_in = gathers_in if num_shards > 1 else None
        align = lcm(align, block_size, 1 if gathers_in is None else gathers_in.align)
        self.layout = _laid_out(shapes, owners, num_shards=num_shards, align=align)
        self._quantized = QuantizedGather.of(gathers_in, self.layout, groups.shard)
        self.secondary = SecondaryShard.of(self.layout, groups)
        self.full, self.shard, self.host, self.common = first_values(
            self.params,
            self.layout,
            groups,
            stage=stage,
            compute_dtype=compute_dtype,
            shard_index=self.shard_index,
            copier=copier,
            keeps_shard=keeps_shard,
            is_apart=self._quantized is not None,
            start=start,
        )
        self.full_views = full_views(self.full, self.layout)
        self._holders = MemoryHolders([name for name, _ in named_params])
        self.left: Tensor | None = None
        for param, view in zip(self.params, self.full_views, strict=True):
            if param.is_meta:
                give_memory(param, view)
        self._view_shards()
        self.stand_ins = StandIns(self.params, [name for name, _ in named_params])
        self._shown, self._all = ShownViews(self.params), range(len(self.params))
        self._presented: list[nn.Parameter] = []  # to user code, while they are in shards
        self._are_sharded = False  # those, to user code
        self.on_assigned: Callable[[], None] = self._adopt_assigned
        if self._quantized is not None and not self.reshards:
            self._quantized.begin(self.shard, self.full).wait()
        self.present_full()

    @property
    def reshards(self) -> bool:
        """Whether the full parameters exist only while a forward or backward needs them."""
        return self.stage == 3

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(param.requires_grad for param in self.params)

    @property
    def has_master(self) -> bool:
        """Whether the full parameters are rounded, as those of blocks under stage 3 may be."""
        return self.full.dtype != self.master_dtype

    @property
    def is_rounded(self) -> bool:
        """Whether the full parameters lack digits of the shards, by their format or travel."""
        return self.has_master or self._quantized is not None

    @property
    def codec(self) -> ShardCodec | None:
        """What makes shards smaller that travel; None where they travel as they are."""
        return None if self._quantized is None else self._quantized.codec

    @property
    def known_bytes(self) -> int:
        """Bytes that stay between steps to tell edits of full parameters from their rounding."""
        return 0 if self._quantized is None or self.reshards else self._quantized.row_bytes

    def gather_in(self, dtype: torch.dtype) -> Tensor:
        """Have full parameters in another format from now on; they are resharded after it."""
        if self.is_unsharded:
            self.take_in_edits()
        self.left = None
        self.forget_secondary()
        if self.codec is not None:
            self.codec.forget()
        before, self.full = self.full, torch.empty_like(self.full, dtype=dtype)
        self.full_views = full_views(self.full, self.layout)
        if self.reduce_dtype == torch.float16:  # too narrow for what comes from outside autocast
            self.reduce_dtype = dtype
        self.reshard()
        return before

    @property
    def is_owned(self) -> bool:
        """Whether each parameter lies full on one rank, which updates it."""
        return isinstance(self.layout, OwnedLayout)

    @property
    def has_local_form(self) -> bool:
        """Whether the optimizer updates shards or master copies, not the full parameters."""
        return self.stage > 0 or self.has_master or self.is_split

    @property
    def is_unsharded(self) -> bool:
        """Whether `full` has memory; its content is valid once the gather has been waited for."""
        if self.common is not None:
            return self._is_here
        return self.left is None and self.full.untyped_storage().nbytes() > 0

    def _view_shards(self) -> None:
        self.local_views = self.master_views = self.shard_views(self.shard)
        if self.host is not None and not self.is_away:
            self.master_views = self.shard_views(self.host.tensor)

    @property
    def master(self) -> Tensor:
        """The shard that the optimizer updates, shape (S,)."""
        return self.shard if self.host is None else self.host.tensor

    def own_part(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a full-sized flat tensor, as a view."""
        return full[slice(*self.layout.shard_bounds(self.shard_index))]

    def shard_views(self, shard: Tensor) -> list[Tensor]:
        """Return parameters' shards as views of a tensor like `shard`: 1-D, under stage 0 full."""
        if self.stage == 0:
            return full_views(shard, self.layout)
        return shard_views(shard, self.layout, self.shard_index)

    @as_they_are
    @unrecorded
    def present_full(self) -> None:
        """Let every parameter show its full shape; `full` must be unsharded."""
        self.present_shards(sharded=False)
        self.see_assigned()  # the views are others after it
        self._show(self.full_views)

    def _show(self, views: list[Tensor]) -> None:
        """Point parameters at views, unless they show these; `see_assigned` has been called."""
        if self._shown.are is not views or not self._shown.have_their_form:
            self._point(self._all, views)
            self._shown.show(views)

    def _point(self, indices: Sequence[int], views: Sequence[Tensor]) -> None:
        lifted = self.stand_ins.lift(indices)
        for index, view in zip(indices, views, strict=True):
            SET_OWN_DATA(self.params[index], view)
        self.stand_ins.put(lifted)

    @as_they_are
    def take_away(self, index: int) -> Tensor | None:
        """Return what user code has pointed a parameter at, which shows its view again."""
        value, view = self.params[index].data, self._shown.are[index]
        if value.data_ptr() == view.data_ptr():
            return None
        self._point([index], [view])
        return value

    def settle_in(self, home_of: Callable[[int], ParameterHome]) -> None:
        """Let parameters look full to user code while they are in shards."""
        homes = {param: home_of(index) for index, param in enumerate(self.params)}
        self._presented = [param for param, home in homes.items() if settle_in(param, home)]
        self._are_sharded = False

    def move_out(self) -> None:
        """End `settle_in`: let sharded parameters show themselves as they are."""
        for param in self._presented:
            move_out(param)
        self._presented = []

    def present_shards(self, *, sharded: bool) -> None:
        """Let sharded parameters look full to user code, or show themselves as they are."""
        if sharded is not self._are_sharded:
            present(self._presented, sharded=sharded)
            self._are_sharded = sharded

    @as_they_are
    def see_assigned(self) -> None:
        """Take over values that user code has assigned to parameters, found by a quick check."""
        if self.left is not None:
            self.take_in_left()
        if not self._shown.stand:
            with torch.no_grad():
                self.on_assigned()

    @as_they_are
    def refuse_assigned(self) -> None:
        """Raise ConfigError if user code has assigned a value, as between forward and backward."""
        if not self._shown.stand:
            names = [self.layout.slots[index].name for index in self._shown.assigned()]
            raise refuse_moved(names, self.groups.dp.rank)

    @as_they_are
    def assigned(self) -> dict[int, Tensor]:
        """Return copies of the values that user code has assigned, by the parameter's index."""
        if self.full.is_meta or (self._shown.stand and self._shown.lie_straight):
            return {}
        params, device = self.params, self.full.device
        return {one: params[one].data.to(device, copy=True) for one in self._shown.assigned()}

    def _adopt_assigned(self) -> None:
        self.adopt(self.assigned())

    @as_they_are
    @unrecorded
    def adopt(self, values: Mapping[int, Tensor]) -> None:
        """Write values into the buffers, as if user code had written them into what is shown.

        They are in the shape that a parameter shows, or in its own, by index.
        """
        if values:
            self._move()
        for index, value in values.items():
            shown, slot = self._shown.are[index], self.layout.slots[index]
            if value.shape not in (shown.shape, slot.shape):
                rank = self.groups.dp.rank
                raise refuse_shape(slot.name, value.shape, shown.shape, slot.shape, rank)
            self._point([index], [shown])
            if value.shape == slot.shape:
                self._adopt_full(index, value)
            else:
                self._updated_views[index].copy_(value)

    @property
    def _updated_views(self) -> list[Tensor]:
        """View of each parameter's elements in the shard that leads now."""
        return self.master_views if self._shown.are is self.master_views else self.local_views

    def _move(self) -> None:
        """Go on in new memory if user code kept tensors to assign again: `kept = param.data`."""
        left, shows_full = self._shown.are, self._shown.are is self.full_views
        is_part = self.shard.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr()
        shows_host = self.host is not None and left is self.master_views
        if self.host is not None and shows_host:
            self.host.move()
            self.shard = self.host.tensor if self.is_away else self.shard
        else:
            if is_part or shows_full:
                self.full = (
                    self.memory.copy(self.full) if self.common is None else self.common.leave()
                )
                self.full_views = full_views(self.full, self.layout)
            if is_part:
                self.shard = self.own_part(self.full)
            elif not shows_full:
                self.shard = self.memory.copy(self.shard)
        self._view_shards()
        local = self.master_views if shows_host else self.local_views
        self._shown.show(self.full_views if shows_full else local)
        for index, view in enumerate(left):
            if self.params[index].data_ptr() == view.data_ptr():
                self._point([index], [self._shown.are[index]])

    def _adopt_full(self, index: int, value: Tensor) -> None:
        """Write a full value; the master keeps its digits where the parameter has not changed."""
        local = self._updated_views[index]
        local.copy_(self._edited(local, self._own_part(index, value).to(local.device), index))
        if self.is_unsharded:
            self.full_views[index].copy_(value)

    def _edited(self, local: Tensor, part: Tensor, index: int | None = None) -> Tensor:
        """Return a shard with a part of the full tensor; where both are equal, all its digits.

        With an index, both are of that parameter alone.
        """
        if not self.is_rounded or part.dtype != self.full.dtype:
            return part
        return torch.where(part != self._rounded(local, index), part.to(local.dtype), local)

    def _rounded(self, local: Tensor, index: int | None = None) -> Tensor:
        """Return what the full parameters have, or would have, of a shard; see `_edited`."""
        gathered = None if self._quantized is None else self._quantized.gathered()
        if gathered is None:
            return local.to(self.full.dtype)
        part = gathered if index is None else self.shard_views(gathered)[index]
        return part.to(local.device, self.full.dtype)

    @as_they_are
    def own_value(self, index: int) -> Tensor:
        """Return this rank's part of a parameter, with what user code has written to the full."""
        self.see_assigned()
        local = self.local_views[index]
        if not self.is_unsharded:
            return local
        part = self._own_part(index, self.full_views[index]).to(local.device)
        return self._edited(local, part, index)

    def as_shown(self, index: int, value: Tensor) -> Tensor:
        """Return a tensor of a parameter's own shape as that shows itself; any other as is."""
        shape = self.layout.slots[index].shape
        is_full = value.shape == shape and self.params[index].shape != shape
        return self._own_part(index, value) if is_full else value

    def _own_part(self, index: int, value: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of a parameter's own shape."""
        if self.stage == 0:
            return value
        shard_slice = self.layout.shard_slice(self.layout.slots[index], self.shard_index)
        return value.flatten()[shard_slice.param_offset : shard_slice.param_stop]

    @as_they_are
    @unrecorded
    def present_local(self) -> None:
        """Let every parameter show this rank's shard."""
        self.see_assigned()
        self._show(self.local_views)

    @as_they_are
    @unrecorded
    def present_master(self) -> None:
        """Let every parameter show the shard that the optimizer updates."""
        self.see_assigned()
        self.settle()
        self._show(self.master_views)

    def settle(self) -> None:
        """Under offload, carry user code's changes of the shard over to the optimizer's."""
        if self.host is not None and not self.is_away:
            self.host.take_in(self.shard)

    def send_up(self) -> None:
        """Under offload, carry changes of the optimizer's shard over to the device."""
        if self.host is not None and not self.is_away:
            self.host.send_up(self.shard)
            self.host.copier.join()

    def begin_unshard(self) -> Pending | QuantizedArrival | Uploaded | None:
        """Start bringing the full parameters together from the shards; each rank must call."""
        if self.reshards:
            self.see_assigned()
        if self.secondary is not None:
            if self.secondary.serves:
                self.left = None
                return self.secondary.begin(self._allocated())
            self.secondary.note_gathered(self.shard)
        if self.common is not None:
            self._is_here = True
            return self.common.gather()
        self.left, gather = None, self._gather
        if self._quantized is not None:
            return self._quantized.begin(self.shard, self._allocated())
        if self.host is not None and self.is_away:
            own = self.own_part(self._allocated())
            return self.host.unshard(own, partial(gather, own))
        return gather(self._sent())

    def keep_secondary(self) -> None:
        """Keep a part of full parameters that have just come, if there is to be a second copy."""
        if self.secondary is not None and self.common is None:
            self.secondary.keep(self.full)

    def forget_secondary(self) -> None:
        """Give this rank's part of the second copy back."""
        if self.secondary is not None and self.secondary.is_kept:
            self.secondary.forget()
            if self._quantized is not None and not self.is_unsharded:
                self._quantized.forget()

    def _allocated(self) -> Tensor:
        if not self.full.untyped_storage().nbytes():
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        return self.full

    @unrecorded
    def _sent(self) -> Tensor:
        """Return this rank's elements, in the format in which they are gathered."""
        own = self.own_part(self._allocated())
        if self.shard.dtype == own.dtype and self.layout.num_shards > 1:
            return self.shard
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        return own

    @property
    def _gather(self) -> Callable[[Tensor], Pending | None]:
        """What brings the ranks' own parts together."""
        if self.layout.num_shards == 1:
            return lambda own: None
        sizes = self.layout.shard_numels
        return partial(self.groups.shard.all_gather, self.full, sizes=sizes, async_op=True)

    @unrecorded
    def take_in_edits(self) -> None:
        """Carry user code's changes of the full parameters over to the shard.

        A master keeps its digits wherever the full parameter still is what it was rounded to.
        """
        self.see_assigned()
        own = self.own_part(self.full)
        if own.data_ptr() == self.shard.data_ptr():
            return
        if self.host is not None and self.is_away:
            self.host.take_in(own)
            return
        self.shard.copy_(self._edited(self.shard, own))

    def own_values(self) -> list[Tensor]:
        """Return this rank's part of what each parameter shows, in the format of compute."""
        return [
            self._own_part(index, value)
            if value.shape == self.layout.slots[index].shape
            else value.to(self.full.dtype)
            for index, value in enumerate(param.data for param in self.params)
        ]

    def shown_parts(self) -> list[Tensor]:
        """Return `own_values` in as few tensors as there can be."""
        if not self._shown.stand:
            return self.own_values()
        return [self.own_part(self.full) if self.is_unsharded else self.shard.to(self.full.dtype)]

    def mark(self) -> int:
        """Return a number that changes when the values of the optimizer's shard do."""
        return int(sum_of_bits(self.master))

    @unrecorded
    def load(self, index: int, value: Tensor) -> None:
        """Overwrite a parameter by a tensor of its own shape, without the blank elements."""
        if self.is_unsharded:
            overwrite(self.full_views[index], value)
        overwrite(self.local_views[index], self._own_part(index, value))
        if self.master_views is not self.local_views:
            overwrite(self.master_views[index], self._own_part(index, value))

    @unrecorded
    def take_in_left(self) -> None:
        """Carry over to the shard what user code has written to the memory that it holds."""
        if self.left is None:
            return
        own = self.own_part(self.full)
        edited = (own != self.left).to(self.shard.device)
        self.shard.copy_(torch.where(edited, own.to(self.shard), self.shard))
        self.left = own.clone()

    @as_they_are
    def reshard(self, ends: Sequence[Tensor] | None = None) -> None:
        """Point the parameters at their shards and give the full memory back.

        `ends` are as for `MemoryHolders.are_there`.
        """
        self.present_local()
        self.present_shards(sharded=True)
        if self.common is not None:
            self._is_here = False
            return
        self.free(ends)

    def free(self, ends: Sequence[Tensor] | None = None) -> None:
        """Give the full memory back unless user code holds it."""
        if self._holders.are_there(self.full, ends):
            if self.left is None:
                self.left = self._rounded(self.shard).clone()
            return
        self.left = None
        is_kept = self.secondary is not None and self.secondary.is_kept  # as it was rounded
        if self._quantized is not None and not is_kept:
            self._quantized.forget()
        if not self.full.untyped_storage().resizable():  # user code has had an array of numpy's
            self.full = torch.empty_like(self.full)
            self.full_views = full_views(self.full, self.layout)
        self.full.untyped_storage().resize_(0)

    @as_they_are
    def warn_of_holders(self) -> None:
        """Say once that user code holds the full memory, if so; its elements are others by now."""
        self.free()
        if self.left is not None:
            self._holders.warn(self.full, self.full_views)

    def full_values(self) -> list[Tensor]:
        """Return each parameter, full and in the optimizer's format; each rank must call."""
        self.see_assigned()
        if self.is_unsharded:
            self.take_in_edits()
        self.settle()
        if self.reshards or self.is_rounded:
            return self.gather_shards(self.master)
        return self.full_views

    def joined(self, index: int, local: Tensor) -> Tensor:
        """Bring one parameter together from shards of any format; each rank must call."""
        shard = self.shard.new_zeros(self.shard.shape, dtype=local.dtype)
        self.shard_views(shard)[index].copy_(local)
        return self.gather_shards(shard)[index].clone()

    @unrecorded
    def gather_shards(self, shard: Tensor) -> list[Tensor]:
        """Bring a tensor like `shard` together, as views in parameters' shapes; collective."""
        shard = shard.to(self.full.device)
        if self.layout.num_shards == 1:
            return full_views(shard, self.layout)
        full = shard.new_empty(self.layout.full_numel)
        self.groups.shard.all_gather(full, shard, sizes=self.layout.shard_numels).wait()
        return full_views(full, self.layout)
