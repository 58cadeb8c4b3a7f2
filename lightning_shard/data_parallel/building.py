"""Building an engine's units of flat parameters, and the buffers of their gradients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout.flat import assign_owners
from lightning_shard.data_parallel.compression.compressor import Exchange, FlatBuffer
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit, ranks_of
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.units.unit import Unit
from lightning_shard.data_parallel.units.units import UnitSpec, find_units
from lightning_shard.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The owner of each parameter that lies here, or in part, and is updated full.

    stage 1 to 3              the shard ranks have shards     one of them has it full, all the time
    tensor parallel           the ranks of a layer have parts one gathers it for each update
    both                      S x T ranks, of which one       shard rank s has its T ranks' parts
                              updates                         full, and rank t of those gathers
    """

    rank: int = 0
    of_shards: Mapping[nn.Parameter, int] = field(default_factory=dict)
    of_parts: Mapping[nn.Parameter, int] = field(default_factory=dict)

    def gathers(self, param: nn.Parameter) -> bool:
        """Whether this rank gathers the parts of `param` that ranks of its layer have."""
        return self.of_parts.get(param) == self.rank

    def gathered_elsewhere(self, param: nn.Parameter) -> bool:
        """Whether another rank of its layer gathers `param`, and has its state."""
        return self.of_parts.get(param, self.rank) != self.rank


def share_out(
    model: nn.Module, groups: DataGroups, options: EngineOptions, split: ModelSplit
) -> Owners:
    """Give each parameter that is updated full an owner, trained ones first; no communication."""
    parts = split.parts
    num_shards = groups.shard.size if options.stage > 0 else 1
    num_parts = 1 if parts is None else parts.group.size
    if num_shards == num_parts == 1 and options.stage == 0:
        return Owners()
    owned = [one for one in model.parameters() if one in options.owned and split.is_here(one)]
    ranks: dict[nn.Parameter, int] = {}
    for is_trained in (True, False):
        some = [param for param in owned if param.requires_grad is is_trained]
        numels = [split.full_shape(param).numel() for param in some]
        ranks.update(
            zip(some, assign_owners(numels, num_ranks=num_shards * num_parts), strict=True)
        )
    return Owners(
        rank=0 if parts is None else parts.group.rank,
        of_shards={} if options.stage == 0 else {p: one % num_shards for p, one in ranks.items()},
        of_parts={} if parts is None else {p: one // num_shards for p, one in ranks.items()},
    )


def build_units(
    model: nn.Module,
    groups: DataGroups,
    options: EngineOptions,
    split: ModelSplit,
    owners: Mapping[nn.Parameter, int],
    copier: HostCopier | None = None,
) -> list[Unit]:
    """Lay a model's parameters out in flat buffers; each rank must call.

    `owners` says which rank of the shard group has a parameter full, for those not in shards.
    """
    specs = find_units(
        model,
        classes=options.units,
        bucket_mb=options.unit_mb,
        is_here=split.is_here,
        undivided=split.undivided,
    )
    units = [_build_unit(spec, groups, options, split, owners, copier) for spec in specs]
    all_stay = exist_once(units)
    for unit in units:
        unit.stays = unit.is_root or all_stay
    return units


def _build_unit(
    spec: UnitSpec,
    groups: DataGroups,
    options: EngineOptions,
    split: ModelSplit,
    owners: Mapping[nn.Parameter, int],
    copier: HostCopier | None,
) -> Unit:
    keeps_shard = options.offload == "optimizer"
    formats_of = partial(options.full_dtype, in_block=bool(spec.modules))
    travels_as = partial(options.reduce_dtype, in_block=bool(spec.modules))

    def kind(item: tuple[str, nn.Parameter]) -> tuple[object, ...]:
        param = item[1]
        formats = map(str, (param.dtype, formats_of(param), travels_as(param)))
        is_apart = ranks_of(param, groups, split) is not groups
        return *formats, spec.matching.flags_of(param), param in owners, is_apart

    def place(item: tuple[str, nn.Parameter]) -> tuple[object, ...]:
        """Vectors come after matrices: optimizers' groups often part them, for weight decay.

        Not where each optimizer has all elements, nor where compressors keep a memory in the order
        of a buffer: earlier runs have saved it, and what local SGD cuts into fragments.
        """
        has_pieces = options.stage > 0 and options.compression is None
        comes_later = has_pieces and item[1].ndim < 2
        return kind(item), owners.get(item[1], 0), comes_later

    ordered = sorted(spec.params, key=place)
    alike = [list(group) for _, group in groupby(ordered, key=kind)]
    flats = [
        FlatParameters(
            named,
            ranks_of(named[0][1], groups, split),
            stage=options.stage,
            compute_dtype=formats_of(named[0][1]),
            reduce_dtype=travels_as(named[0][1]),
            is_split=bool(split.groups_of_layers)
            or any(param in split.full_shapes for _, param in named),
            owners=[owners[param] for _, param in named if param in owners],
            copier=None if keeps_shard and not _is_trained(named) else copier,
            keeps_shard=keeps_shard,
            start=options.start,
        )
        for named in alike
    ]
    unit = Unit(spec.name, spec.modules, flats)
    if options.start is not None and options.stage == 3:
        unit.reshard()  # before the next one gets memory
    return unit


def exist_once(units: Iterable[Unit]) -> bool:
    """Whether all parameters exist once per host."""
    return all(
        flat.common is not None or not flat.layout.full_numel
        for unit in units
        for flat in unit.flats
    )


def _is_trained(named: Sequence[tuple[str, nn.Parameter]]) -> bool:
    return any(param.requires_grad for _, param in named)


def build_gradients(
    units: Sequence[Unit], reducing: DataGroups, options: EngineOptions, split: ModelSplit
) -> list[FlatGradients]:
    """Make the gradients' buffers of all parameters that can have gradients."""
    flats = [flat for unit in units for flat in unit.flats]
    unshards_in_backward = options.stage == 3 and not exist_once(units)
    return [
        FlatGradients(
            flat,
            reducing_of(flat, reducing, split),
            waits_for_end=unit.is_root and unshards_in_backward,
            exchange=_exchange(flat, flats.index(flat), reducing, options, split),
        )
        for unit in units
        for flat in unit.flats
        if flat.full.is_floating_point() or flat.full.is_complex()
    ]


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
    if options.compression is None:
        return None
    if flat.full.is_complex() or reducing.replicate is not None or split.groups:
        raise ConfigError(
            "Compression works on real gradients of full parameters that every data-parallel "
            "rank shares, not on complex ones, nor with hybrid sharding, tensor or pipeline "
            "parallel. Leave it out."
        )
    buffer = FlatBuffer(
        layout=flat.layout,
        ranks=reducing.dp,
        keeps_all=flat.stage == 0,
        number=number,
        device=flat.full.device,
        dense_itemsize=_dense_itemsize(flat, reducing.dp),
    )
    return options.compression.exchange(buffer)


def _dense_itemsize(flat: FlatParameters, ranks: Collectives) -> int:
    """Return the bytes of one gradient element when `FlatGradients` sends it uncompressed."""
    own, result = flat.reduce_dtype, flat.shard.dtype
    into = result if result == torch.float32 else own
    return ranks.dtype_on_the_wire(own, None if flat.stage == 0 else into).itemsize


def placed(flats: Iterable[tuple[T, FlatParameters]]) -> dict[nn.Parameter, tuple[T, int]]:
    """Return by parameter the object paired with its buffer, and its index in that buffer."""
    return {param: (of, index) for of, flat in flats for index, param in enumerate(flat.params)}
