"""Lets the parameters of an engine look full to user code while they are in shards.

Where a shard of ZeRO stage 3 meets a tensor of another size element by element all the same, or
code was to be compiled as one graph, torch's error does not say why: here it gets names and advice.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.core.call_site import calls_through
from lightning_shard.core.modules import hookable
from lightning_shard.data_parallel.gradients.gradient_shards import GradientShards
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit, fewer_ranks_of
from lightning_shard.data_parallel.phases import UserCode
from lightning_shard.data_parallel.torch_private import GRAPH_ENDS
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
from lightning_shard.errors import ConfigError, ShardError

_MISFIT = re.compile(
    r"must match|doesn't match|size mismatch|Sizes of tensors|is invalid for input|"
    r"out of range|too many indices|inconsistent tensor size|same shape|same size|at least 2|"
    r"Fan in and fan out|Only tensors with|tensors? with .* dimensions|must be a matrix"
)
_INITIALISES = re.compile(r"Fan in and fan out|Only tensors with")
_SETS_GRADIENT = re.compile(r"assign a gradient of size")
_SIZES = re.compile(r"size of tensor a .* must match the size of tensor b")
_PACKAGE = str(Path(__file__).parents[2])
_AS_WRITTEN = "Compilation was not attempted"  # torch's words: a pipeline runs it as written
_MOST_VALUES = 2000  # of a list that is looked through

Homes = Mapping[nn.Parameter, tuple[FlatParameters, int]]


def look_full(
    units: Iterable[Unit],
    shards: GradientShards,
    unsharder: Unsharder,
    split: ModelSplit,
    user_code: UserCode,
) -> None:
    """Let parameters look full whenever they are in shards and user code runs."""
    units = [*units]
    named = {
        slot.name: param
        for unit in units
        for flat in unit.flats
        for slot, param in zip(flat.layout.slots, flat.params, strict=True)
    }

    def home(
        param: nn.Parameter,
        bring: Callable[[], bool],
        is_rounded: Callable[[], bool] = lambda: False,
    ) -> ParameterHome:
        spread, groups = shards.spread_of(param), split.groups_of(param)
        if any(group in split.groups_of_layers for group in groups):
            is_of_some = fewer_ranks_of(groups, split) is not None
            refusal = _refusal(spread.name, is_of_expert=is_of_some)
            spread = replace(spread, refusal=refusal, is_of_some=is_of_some)
        return ParameterHome(spread, shards.note_of(param), user_code, bring, named, is_rounded)

    def home_in(unit: Unit, flat: FlatParameters, index: int) -> ParameterHome:
        return home(
            flat.params[index],
            partial(unsharder.bring, unit),
            lambda: unit.state is UnitState.HIDDEN,
        )

    beside = set[nn.Parameter]()
    for unit in units:
        for flat in unit.flats:
            flat.settle_in(partial(home_in, unit, flat))
            flat.present_shards(sharded=unit.is_resharded)
        for param in (one for module in unit.modules for one in module.parameters()):
            if not split.is_here(param):
                settle_beside(param, partial(_brought_beside, unit, unsharder.bring))
                beside.add(param)
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


def _refusal(name: str, *, is_of_expert: bool) -> str:
    """Return why ranks do not come together where user code reads elements of a parameter."""
    if is_of_expert:
        return (
            f"Elements of {name!r}, of an expert in a list, are read outside of autograd, but with "
            f"zero_stage=3 they are in shards on the ranks that have the expert, which do not come "
            f"here alone; expected zero_stage=2 or less, where hooks see all experts full. Or read "
            f"them from a checkpoint."
        )
    return (
        f"A step or hook reads elements of {name!r} outside of autograd, or calls its layer, but "
        f"they are in shards on several ranks, which a pipeline does not bring here at the same "
        f"time; expected zero_stage=2 or less, where hooks see all weights full."
    )


def of_all_ranks(spread: Spread) -> Spread | None:
    """Return a spread for what all ranks do together; None where some have no element."""
    if spread.is_of_some:
        return None
    return replace(spread, refusal="") if spread.refusal else spread


def cut_loaded(
    model: nn.Module,
    homes: Homes,
    split: ModelSplit,
) -> list[RemovableHandle]:
    """Let each module of a model take in full tensors as well as shards."""

    def own(param: nn.Parameter, value: Tensor) -> Tensor:
        if looks_full(param):
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


@contextmanager
def explaining_shards(homes: Homes) -> Iterator[None]:
    """Say which parameters are shards where user code inside fails on their sizes."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ShardError) or not _MISFIT.search(str(error)):
            raise
        sizes = {int(number) for number in re.findall(r"\d+", str(error))}
        seen = _shards_in(error, homes)
        fitting = [param for param in seen if param.numel() in sizes] or seen
        if _SIZES.search(str(error)) and not fitting:  # lists that were made for the call
            fitting = _of_sizes(sizes, homes)
        if not fitting:
            raise
        names = " and ".join(_described(*homes[param]) for param in fitting[:2])
        names = names if seen else f"Shards as large as {names}"
        raise ConfigError(
            f"Between the steps of ZeRO stage 3 each rank has shards of the parameters. {names} "
            f"{_advice(error)}"
        ) from error


def _advice(error: Exception) -> str:
    """Say what went wrong with shards, and what to do."""
    if _SETS_GRADIENT.search(str(error)):
        return (
            f"was given a gradient that was set by hand ({error}), expected gradients to come from "
            f"backward, which averages them over the ranks. Call self.manual_backward(loss), or "
            f"use strategy='shard_ddp'."
        )
    if _INITIALISES.search(str(error)):
        return (
            f"was to be initialised ({error}), expected a full parameter. Initialise in __init__, "
            f"setup, configure_model or on_fit_start; later draw new values into a layer of its "
            f"own and load them, the same on every rank: layer.load_state_dict(fresh.state_dict())."
            f" Or use strategy='zero2'."
        )
    return (
        f"met what is not cut alike ({error}), expected tensors of equal shapes in the same order: "
        f"a teacher that is a deep copy of a whole submodule, made in __init__, setup or "
        f"configure_model as a part of the module, or by a callback in on_fit_start or later. Copy "
        f"a submodule as a whole, use Lightning's EMAWeightAveraging, or use strategy='zero2'."
    )


def _of_sizes(sizes: Collection[int], homes: Homes) -> list[nn.Parameter]:
    """Return one parameter for each size that is that of a shard."""
    found: dict[int, nn.Parameter] = {}
    for param in homes:
        if _is_shard(param, homes) and param.numel() in sizes:
            found.setdefault(param.numel(), param)
    return list(found.values())


def _described(flat: FlatParameters, index: int) -> str:
    slot = flat.layout.slots[index]
    return f"{slot.name!r} ({flat.params[index].numel()} elements here of shape {slot.shape})"


def _shards_in(error: Exception, homes: Homes) -> list[nn.Parameter]:
    """Return the parameters that show shards in the innermost call that has any."""
    found: list[nn.Parameter] = []
    for _, values in calls_through(error):
        found = [one for one in _values([*values.values()]) if _is_shard(one, homes)] or found
    return list(dict.fromkeys(found))


def _values(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, (list, tuple)):
            yield from value[:_MOST_VALUES]


def _is_shard(value: Any, homes: Homes) -> bool:
    if not isinstance(value, nn.Parameter) or value not in homes:
        return False
    flat, index = homes[value]
    return value.shape != flat.layout.slots[index].shape


@contextmanager
def explaining_gradients(stage: int) -> Iterator[None]:
    """Explain torch's error that a gradient does not fit a shard."""
    try:
        yield
    except RuntimeError as error:
        if stage < 3 or "invalid gradient" not in str(error):
            raise
        raise ConfigError(
            "Under ZeRO stage 3 a block's parameters are full only inside the block's forward, "
            "but training_step has computed with them outside (a penalty over self.parameters(), "
            "say). Use the optimizer's weight_decay, compute inside the block's forward, or use "
            "strategy='zero2'."
        ) from error


@contextmanager
def explaining_graphs() -> Iterator[None]:
    """Name the option where code that is to be one graph runs what ends a graph here."""
    try:
        yield
    except RuntimeError as error:
        if not _ends_graphs(error):
            raise
        raise ConfigError(
            "torch.compile(fullgraph=True) was asked for one graph of code in which ranks gather "
            "parameters or exchange parts of layers or sequences, or a stage of a pipeline begins, "
            "and there a graph ends; expected compiled code that may be cut. Leave fullgraph=True "
            "out. Or compile each block of a list by itself, block.compile(fullgraph=True), which "
            "zero3 and pipelines take; tensor and context parallel cut blocks, too."
        ) from error


def _ends_graphs(error: RuntimeError) -> bool:
    text = str(error)
    if type(error).__module__.startswith("torch._dynamo"):
        return GRAPH_ENDS in text or _PACKAGE in text
    return _AS_WRITTEN in text
