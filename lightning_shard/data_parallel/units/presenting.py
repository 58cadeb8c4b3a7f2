"""Lets the parameters of an engine look full to user code while they are in shards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.modules import hookable
from lightning_shard.data_parallel.gradients.gradient_shards import GradientShards
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit, fewer_ranks_of
from lightning_shard.data_parallel.phases import UserCode
from lightning_shard.data_parallel.units.unit import Unit, UnitState
from lightning_shard.data_parallel.units.unsharding import Unsharder
from lightning_shard.data_parallel.views.sharded_parameter import (
    ParameterHome,
    looks_full,
    present,
    settle_beside,
    settle_in,
)
from lightning_shard.data_parallel.views.sharded_tensor import Spread
from lightning_shard.errors import ConfigError


def look_full(
    units: Iterable[Unit],
    shards: GradientShards,
    unsharder: Unsharder | None,
    split: ModelSplit,
    user_code: UserCode,
) -> None:
    """Let parameters look full whenever they are in shards and user code runs.

    There are shards from stage 1 on, but of a model that is split over other ranks, too, at stage 3
    only. Below it, no `unsharder` unshards units for autograd.
    """
    units = [*units]
    named = {
        slot.name: param
        for unit in units
        for flat in unit.flats
        for slot, param in zip(flat.layout.slots, flat.params, strict=True)
    }

    def bring(unit: Unit) -> bool:
        return unsharder is not None and unsharder.bring(unit)

    def home(
        param: nn.Parameter,
        bring: Callable[[], bool],
        is_rounded: Callable[[], bool] = lambda: False,
    ) -> ParameterHome:
        spread: Spread = shards.spread_of(param)
        groups = split.groups_of(param)
        if any(group in split.groups_of_layers for group in groups):
            is_apart = fewer_ranks_of(groups, split) is not None
            spread = _OfOneExpert(spread) if is_apart else _OfOneStage(spread)
        note, is_of_part = shards.note_of(param), bool(split.groups)
        return ParameterHome(spread, note, user_code, bring, named, is_of_part, is_rounded)

    def home_in(unit: Unit, flat: FlatParameters, index: int) -> ParameterHome:
        return home(
            flat.params[index], partial(bring, unit), lambda: unit.state is UnitState.HIDDEN
        )

    beside = set[nn.Parameter]()
    for unit in units:
        for flat in unit.flats:
            flat.settle_in(partial(home_in, unit, flat))
            flat.present_shards(sharded=unit.is_resharded)
        for param in (one for module in unit.modules for one in module.parameters()):
            if not split.is_here(param):
                settle_beside(param, partial(_brought_beside, unit, bring))
                beside.add(param)
    if unsharder is not None:
        _show_absent({*shards.absent()} - beside, home)


def _show_absent(
    params: Iterable[nn.Parameter],
    home: Callable[[nn.Parameter, Callable[[], bool]], ParameterHome],
) -> None:
    """Let parameters of other stages look full, which are never brought here."""
    for param in params:
        if settle_in(param, home(param, lambda: False)):
            present([param], sharded=True)


def _brought_beside(unit: Unit, bring: Callable[[Unit], bool]) -> bool:
    """Bring a unit as a rank does of whose part of it more is asked for."""
    return unit.state is UnitState.FULL or bring(unit)


class _OfOneStage:
    """The spread of a parameter whose stage runs a step's user code at a time of its own."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spread, name)

    @property
    def groups(self) -> Sequence[Collectives]:
        """Refuse to combine results of ranks that do not come here together."""
        raise ConfigError(
            f"A step or hook reads elements of {self._spread.name!r} outside of autograd, but they "
            f"are in shards on several ranks, which a pipeline does not bring here at the same "
            f"time; expected zero_stage=2 or less, where hooks see all weights full."
        )

    def join(self, local: Tensor) -> Tensor:
        """Refuse to bring shards together, as `groups` does."""
        assert self.groups
        return local


def of_all_ranks(spread: Spread) -> Spread | None:
    """Return a spread for what all ranks do together; None where some have no element."""
    if isinstance(spread, _OfOneExpert):
        return None
    return spread._spread if isinstance(spread, _OfOneStage) else spread


class _OfOneExpert(_OfOneStage):
    """The spread of a parameter of an expert, which other ranks have none of."""

    @property
    def groups(self) -> Sequence[Collectives]:
        """Refuse to combine results of ranks of which some have no element."""
        raise ConfigError(
            f"Elements of {self._spread.name!r}, of an expert in a list, are read outside of "
            f"autograd, but with zero_stage=3 they are in shards on the ranks that have the "
            f"expert, which do not come here alone; expected zero_stage=2 or less, where hooks "
            f"see all experts full. Or read them from a checkpoint."
        )


def cut_loaded(
    model: nn.Module,
    homes: Mapping[nn.Parameter, tuple[FlatParameters, int]],
    split: ModelSplit,
) -> list[RemovableHandle]:
    """Let each module of a model take in full tensors as well as shards."""

    def own(param: nn.Parameter, value: Tensor) -> Tensor:
        if looks_full(param, through=__name__):
            return value  # is cut where it is copied
        if value.shape == split.full_shapes.get(param):  # not so where the user has cut it
            if not split.is_here(param):
                return param.data  # another rank has it
            value = split.local(param, value)
        flat, index = homes[param]
        return flat.as_shown(index, value)

    # A closure, not a bound method: a copy of a module copies methods' owners.
    def before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            known = param in homes or param in split.full_shapes
            if param is not None and known and isinstance(value, Tensor):
                state[prefix + name] = own(param, value)

    return [
        module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
        for module in hookable(model)
        if module._parameters
    ]
