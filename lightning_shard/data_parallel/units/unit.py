"""A unit at work: its flat buffers and, under stage 3, whether its parameters are unsharded.

    SHARDED ── begin_unshard ──> UNSHARDING ── ensure_full ──> FULL ── reshard ──> SHARDED
                                                   FULL ── hide ──> HIDDEN ── ensure_full ──> FULL
    ROUNDED ── widen ──> WIDENED ── reshard ──> ROUNDED
       └────── widen for good ──> EXACT

Below stage 3 a unit is always FULL.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any
from weakref import ref

from torch import Tensor, nn

from lightning_shard.backends.pending import Pending
from lightning_shard.core.states import State
from lightning_shard.data_parallel.compression.float8_gather import Float8Codec, Float8Scales
from lightning_shard.data_parallel.compression.quantized_gather import (
    BlockCodec,
    QuantizedArrival,
    ShardCodec,
)
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.graph_borders import inputs_with_gradient, on_entry, on_exit
from lightning_shard.data_parallel.memory.flat_parameters import ALIGN_BYTES, FlatParameters
from lightning_shard.data_parallel.memory.leftovers import is_given_back, mark_leftover
from lightning_shard.data_parallel.model_split import ModelSplit, ranks_of
from lightning_shard.data_parallel.offload.copier import HostCopier, Uploaded
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.units.units import UnitSpec, find_units

_ALIGN_BYTES_OF_VECTORS = 256  # so that what is left over of one is the same wherever shards end


class Passage:
    """Calls of blocks, each of which was given what the one before it returned."""

    def __init__(
        self, on_entry: Callable[["Passage"], None], on_exit: Callable[["Passage"], None]
    ) -> None:
        self._on_entry, self._on_exit = on_entry, on_exit
        self.output: Callable[[], Tensor | None] = lambda: None

    def enter(self, _: Any) -> None:
        """Note that a backward has come to a block: a hook of its outputs."""
        self._on_entry(self)

    def leave(self, _: Any) -> None:
        """Note that a backward has come through the first block: a hook of its inputs."""
        self._on_exit(self)


class Passages:
    """Where backwards enter a unit's blocks and leave them: few hooks on the graph, few objects.

        forward     x ──> block 0 ──> block 1 ──> block 2 ──> y     one passage: each block is given
        backward    left <──────────────────────────── entered     what the one before it returned

    Backward comes through such blocks one after the other, so that the first one's inputs tell of
    the end of all. It may enter at each of them, as the gradient of an intermediate result does.
    With 200 small blocks, a passage for each took as long to collect as all hooks together.

    Attributes:
        on_entry: Called with a passage when a backward enters one of its blocks; twice or more in
            one that goes through several.
        on_exit: Called with a passage when a backward has left its first block.
        open_calls: Passages whose backward has not reached their inputs yet.
        open_backwards: Passages that a backward has entered and not left; a second one through a
            retained graph has no open call.
    """

    def __init__(self) -> None:
        self.open_calls: set[Passage] = set()
        self.open_backwards: set[Passage] = set()
        self.on_entry: Callable[[Passage], None] = self.open_backwards.add
        self.on_exit: Callable[[Passage], None] = self.close
        self._running: list[Passage] = []  # forwards, the innermost last
        self._last: Passage | None = None  # whose forward has ended

    @property
    def are_open(self) -> bool:
        """Whether a backward is to come, or under way."""
        return bool(self.open_calls or self.open_backwards)

    def begin_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that the forward of a block begins, with these arguments."""
        inputs = inputs_with_gradient(args, kwargs)
        self._running.append(self._going_on(inputs) or self._begin(inputs))
        self._last = None

    def _going_on(self, inputs: Sequence[Tensor]) -> Passage | None:
        """Return the passage whose last block has returned what the next one is given."""
        last = self._last
        if last is None or last not in self.open_calls or len(inputs) != 1:
            return None
        return last if last.output() is inputs[0] else None

    def _begin(self, inputs: Sequence[Tensor]) -> Passage:
        passage = Passage(self.on_entry, self.on_exit)
        self.open_calls.add(passage)
        # a leaf's hook runs before what else is ready, such as the backward of a weight norm
        if inputs and not any(tensor.is_leaf for tensor in inputs):
            on_exit(inputs, passage.leave)
        return passage

    def end_call(self, outputs: Sequence[Tensor]) -> Passage:
        """Note that a block's forward has ended, with these results that need gradients."""
        passage = self._running.pop() if self._running else Passage(self.on_entry, self.on_exit)
        if not outputs:
            return passage
        on_entry(outputs, passage.enter)
        if len(outputs) == 1 and passage in self.open_calls and not outputs[0].is_leaf:
            passage.output = ref(outputs[0])
            self._last = passage
        return passage

    def close(self, passage: Passage) -> None:
        """Note that a backward has left a passage."""
        self.open_calls.discard(passage)
        self.open_backwards.discard(passage)

    def forget(self) -> None:
        """Forget open passages, since none of their backwards comes any more."""
        self.open_calls.clear()
        self.open_backwards.clear()
        self._running.clear()
        self._last = None


class UnitState(State):
    """Where the full parameters of a unit are."""

    SHARDED = "UNSHARDING"
    UNSHARDING = "FULL SHARDED"  # on their way
    FULL = "FULL HIDDEN SHARDED"
    HIDDEN = "HIDDEN FULL SHARDED"  # here, but rounded, and parameters look sharded


HERE = (UnitState.FULL, UnitState.HIDDEN)


class Digits(State):
    """Which digits the full parameters of a unit have."""

    EXACT = "EXACT"  # those of their shards, from now on
    ROUNDED = "WIDENED EXACT"  # the 16 bits of autocast's regions
    WIDENED = "WIDENED ROUNDED EXACT"  # those of their shards, until the unit is resharded


class Unit:
    """The parameters of some modules, unsharded and resharded together.

    Attributes:
        modules: The blocks whose forward needs the parameters; empty for the root unit.
        flats: One flat buffer per format and `requires_grad`.
        stays: Whether the parameters stay for a whole step: those of the root unit, and all where
            they exist once per host, so that giving them back would free nothing.
        digits: Which digits the full parameters have.
        has_secondary: Whether there is to be a second copy of the parameters in each node.
        kept: Whether the unit stays unsharded until the step ends, or an optimizer updates it,
            since a backward that its hooks do not see may need it.
        was_met: Whether user code may have changed the unit since it was unsharded.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], flats: Sequence[FlatParameters]
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.flats = tuple(flats)
        self.passages = Passages()
        self.kept = self.was_met = False
        self.stays = self.is_root
        self.has_secondary = any(flat.secondary is not None for flat in self.flats)
        self._forwarded: set[nn.Module] = set()
        self._pending: list[Pending | QuantizedArrival | Uploaded] = []
        self.state = UnitState.FULL
        is_rounded = any(flat.has_master for flat in self.flats)
        self.digits = Digits.ROUNDED if is_rounded else Digits.EXACT
        self.on_unshard: Callable[[], None] = lambda: None

    @property
    def is_root(self) -> bool:
        """Whether the parameters lie outside of all blocks."""
        return not self.modules

    @property
    def is_resharded(self) -> bool:
        """Whether the parameters are neither here nor on their way."""
        return self.state is UnitState.SHARDED

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(flat.is_trained for flat in self.flats)

    @property
    def params(self) -> set[nn.Parameter]:
        """The unit's parameters."""
        return {param for flat in self.flats for param in flat.params}

    def begin_unshard(self) -> None:
        """Start the all-gathers unless the parameters are here or on their way."""
        if self.state is UnitState.SHARDED:
            for flat in self.flats if self.passages.open_calls else ():
                flat.refuse_assigned()
            self.on_unshard()
            self._pending = []
            for flat in self.flats:
                if (handle := flat.begin_unshard()) is not None:
                    self._pending.append(handle)
            self.state = self.state.to(UnitState.UNSHARDING)

    def ensure_full(self) -> None:
        """Let the module's parameters show their full shapes, waiting for them if need be."""
        if self.state is UnitState.FULL:
            return
        self.begin_unshard()
        self._wait()
        self._present_full()

    def _wait(self) -> None:
        for handle in self._pending:
            handle.wait()
        self._pending = []

    def _present_full(self) -> None:
        for flat in self.flats:
            flat.present_full()
        self.state = self.state.to(UnitState.FULL)

    def hide(self) -> None:
        """Let parameters that are rounded look sharded between blocks, to the code of a step.

        What reads one there has the unit brought unrounded.
        """
        if self.state in HERE and self.digits is Digits.ROUNDED:
            self.state = self.state.to(UnitState.HIDDEN)
            for flat in self.flats:
                flat.present_local()
                flat.present_shards(sharded=True)

    def widen(self, *, for_good: bool) -> None:
        """Have full parameters unrounded, for code outside autocast; each rank must call."""
        is_due, exact = self.digits is Digits.ROUNDED, for_good or self.digits is Digits.EXACT
        self.digits = self.digits.to(Digits.EXACT if exact else Digits.WIDENED)
        if not is_due:
            return
        if self.state is UnitState.UNSHARDING:
            self.ensure_full()
        was_full, are_saved = self.state in HERE, self.passages.are_open
        rounded = [flat for flat in self.flats if flat.has_master]
        before = [flat.gather_in(flat.master_dtype) for flat in rounded]
        if not (was_full or are_saved):
            return
        self.on_unshard()
        pending = [flat.begin_unshard() for flat in (rounded if was_full else self.flats)]
        for handle in pending:
            if handle is not None:
                handle.wait()
        if not was_full:
            self.state = self.state.to(UnitState.UNSHARDING)
        self._present_full()
        for flat, known in zip(rounded, () if was_full else before, strict=False):
            known.untyped_storage().resize_(known.nbytes)  # for the backwards that are to come
            known.copy_(flat.full)

    def reshard(self, *, edited: bool = False, ends: Sequence[Tensor] | None = None) -> None:
        """Let the parameters show this rank's shards and give the full memory back.

        `ends` are as for `MemoryHolders.are_there`.
        """
        self._wait()
        if (edited or self.was_met) and self.state in HERE:
            for flat in self.flats:
                flat.take_in_edits()
        if self.state is not UnitState.SHARDED:
            for flat in self.flats:
                flat.reshard(ends)
            self.state = self.state.to(UnitState.SHARDED)
        if self.digits is Digits.WIDENED and not self.passages.are_open:
            for flat in (one for one in self.flats if one.full.dtype != one.compute_dtype):
                flat.gather_in(flat.compute_dtype)
            self.digits = self.digits.to(Digits.ROUNDED)
        self.was_met = False
        self._forwarded.clear()

    def leave_as_is(self) -> None:
        """After a failure, leave full parameters in their own format where this rank has them."""
        for flat in (flat for flat in self.flats if not is_given_back(flat)):
            for param, view in zip(flat.params, flat.full_views, strict=True):
                if self.state in HERE:
                    param.grad = None
                    param.data = view.to(flat.master_dtype, copy=True)
                if self.state not in HERE:
                    mark_leftover(param)

    def keep_secondary(self) -> None:
        """Let each node keep a second copy of parameters that have just come, for a backward."""
        for flat in self.flats:
            flat.keep_secondary()

    def forget_secondary(self) -> None:
        """Give the second copy back."""
        for flat in self.flats:
            flat.forget_secondary()

    def forget_calls(self, *, but_kept: bool = False) -> None:
        """Forget open calls and what they keep, since none of their backwards comes any more."""
        self.passages.forget()
        if self.has_secondary:
            self.forget_secondary()
        self.kept = self.kept and but_kept
        self.was_met |= self.kept

    def note_forward(self, module: nn.Module) -> bool:
        """Note that a module's forward is over; return whether the module is the unit's last."""
        self._forwarded.add(module)
        if len(self._forwarded) < len(self.modules):
            return False
        self._forwarded.clear()
        return True


def build_units(
    model: nn.Module,
    groups: DataGroups,
    options: EngineOptions,
    split: ModelSplit,
    owners: Mapping[nn.Parameter, int],
    scales: Float8Scales,
    copier: HostCopier | None = None,
) -> list[Unit]:
    """Lay a model's parameters out in flat buffers; each rank must call.

    `owners` says which rank of the shard group has a parameter full, for those not in shards, and
    `scales` which weights travel as their layers round them.
    """
    specs = find_units(
        model,
        classes=options.units,
        bucket_mb=options.unit_mb,
        is_here=split.is_here,
        undivided=split.undivided,
    )
    units = [_build_unit(spec, groups, options, split, owners, scales, copier) for spec in specs]
    all_stay = exist_once(units)
    for unit in units:
        unit.stays = unit.is_root or all_stay
        for flat in unit.flats:
            if isinstance(flat.codec, Float8Codec):
                scales.add(flat.codec, flat, flat.groups.shard)
    return units


def _build_unit(
    spec: UnitSpec,
    groups: DataGroups,
    options: EngineOptions,
    split: ModelSplit,
    owners: Mapping[nn.Parameter, int],
    scales: Float8Scales,
    copier: HostCopier | None,
) -> Unit:
    keeps_shard = options.offload == "optimizer"
    formats_of = partial(options.full_dtype, in_block=bool(spec.modules))
    travels_as = partial(options.reduce_dtype, in_block=bool(spec.modules))

    def kind(item: tuple[str, nn.Parameter]) -> tuple[object, ...]:
        param = item[1]
        formats = map(str, (param.dtype, formats_of(param), travels_as(param)))
        is_apart = ranks_of(param, groups, split) is not groups
        flags = spec.matching.flags_of(param)
        codec = options.gathers_in(param) is not None, param in scales.weights
        return *formats, flags, param in owners, is_apart, *codec

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
            copier=None
            if keeps_shard and not any(one.requires_grad for _, one in named)
            else copier,
            keeps_shard=keeps_shard,
            start=options.start,
            align_bytes=_ALIGN_BYTES_OF_VECTORS if options.same_bits else ALIGN_BYTES,
            gathers_in=_codec(named, options, scales),
            block_size=options.block_size,
        )
        for named in alike
    ]
    unit = Unit(spec.name, spec.modules, flats)
    if options.start is not None and options.stage == 3:
        unit.reshard()  # before the next one gets memory
    return unit


def _codec(
    named: Sequence[tuple[str, nn.Parameter]], options: EngineOptions, scales: Float8Scales
) -> ShardCodec | None:
    """Return what makes the shards of a buffer smaller when they travel; None for nothing."""
    params = [param for _, param in named]
    if params[0] in scales.weights:
        return scales.codec(params)
    kind = options.gathers_in(params[0])
    return None if kind is None else BlockCodec(kind)


def exist_once(units: Iterable[Unit]) -> bool:
    """Whether all parameters exist once per host."""
    return all(
        flat.common is not None or not flat.layout.full_numel
        for unit in units
        for flat in unit.flats
    )
