"""The full format: an ordinary Lightning `.ckpt`, the same for every scheme.

Parameters come together buffer by buffer, so that no rank but rank 0 holds more than one unit above
its share. Shards that user code puts into a checkpoint itself are joined, too:

    def on_save_checkpoint(self, checkpoint):
        checkpoint["teacher"] = self.teacher.state_dict()     # under stage 3: this rank's shards

A shard is recognised by its memory: an entry that lies where a parameter's shard lies, or that of a
copy made during the run; a cloned one is not. A rank has no elements of some parameters, so ranks
tell each other which entry is which.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard.checkpoint.misfits import dtype_misfits, shape_misfits, weights_error
from lightning_shard.checkpoint.optimizer_state import elements_of, full_form, params_of, part_shape
from lightning_shard.core.modules import hookable
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.inner_tensors import join_entries
from lightning_shard.data_parallel.memory.quantised import pop_scales, scales_of, set_scales
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.data_parallel.optimizer_entries import flattened, joined
from lightning_shard.data_parallel.torch_private import storage_uses, without_function_modes
from lightning_shard.data_parallel.units.full_values import publish_loaded
from lightning_shard.data_parallel.views.parameter_shard import ParameterShard, ShardView
from lightning_shard.errors import CheckpointError, ConfigError

_TORCH_REPORTS = "Error(s) in loading state_dict"


def full_module_state(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """Return the module's `state_dict`, full on rank 0's CPU; each rank must call.

    On other ranks parameters are the module's own up to stage 2, else without elements.
    """
    everywhere = engine.options.stage < 3 and isinstance(engine.split, Unsplit)
    full: dict[int, Tensor] = {}
    for param, value in engine.full_values.each(everywhere=everywhere):
        is_own = value.data_ptr() == param.data_ptr() and not engine.is_first
        full[id(param)] = value if is_own else value.to("cpu", copy=True)
    if not engine.is_first and not (everywhere and engine.groups.is_first_copy):
        return module_shapes(module, engine)
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():  # in place: torch's own mapping knows module versions
        state[name] = full[id(value)] if id(value) in full else detached(value, engine)
    join_entries(module, state)
    return state


def module_shapes(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """Return the full module's `state_dict` with parameters on meta, for code that asks for it."""
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        is_param = isinstance(value, nn.Parameter)
        state[name] = without_elements(value, engine) if is_param else detached(value, engine)
    join_entries(module, state)
    return state


def optimizer_shapes(optimizer: Optimizer, engine: DataParallelEngine) -> dict[str, Any]:
    """Return the optimizer's full `state_dict` without elements; no communication."""
    packed = optimizer.state_dict()
    params = params_of(optimizer)
    packed["state"] = {
        index: joined(
            {
                key: without_elements(params[index], engine, value.dtype, elements)
                if (elements := elements_of(key, value, params[index], engine))
                else full_form(value, params[index], engine)
                for key, value in flattened(entries).items()
            }
        )
        if index in range(len(params))
        else entries
        for index, entries in packed["state"].items()
    }
    return packed


def without_elements(
    param: nn.Parameter,
    engine: DataParallelEngine,
    dtype: torch.dtype | None = None,
    elements: int = 1,
) -> Tensor:
    """Return a full parameter on meta, or a tensor with an element for so many of its own."""
    if dtype is None:
        is_here = engine.knows(param) and engine.split.is_here(param)
        dtype = engine.owner(param)[0].master_dtype if is_here else param.dtype
    shape = engine.full_shape(param)
    shape = part_shape(shape, elements) if elements > 1 else shape
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def detached(value: Any, engine: DataParallelEngine) -> Any:
    """Return an entry that is no parameter as it is saved: on rank 0, a tensor on the CPU."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if engine.is_first else value.detach()


class MappedParameters:
    """Lends a module's parameters what they would load, where that is all that loading does.

        built by the user      param ──> own memory
        lent                   param ──> mapped file    own memory waits: something may not fit
        the engine is made     param ──> shards         a rank reads what becomes its own
        given up               param ──> own memory     as it was

    A parameter whose memory something else sees too, or that is in another format or order than in
    the file, is left alone, to be loaded as ever.
    """

    def __init__(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        self._lent: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # own values, and the file's
        self.state = copy.copy(state)  # with what torch's own mapping knows of module versions
        left: Any = self.state
        for param, names in _names(module).items():
            value = _one_value(names, state)
            if value is not None and _can_show(param, value):
                self._lent[param] = param.data, value
                left.update(dict.fromkeys(names, param))  # to be loaded from itself

    @property
    def params(self) -> Collection[nn.Parameter]:
        """The parameters that are lent something, whose own values stay as they are."""
        return self._lent.keys()

    def lend(self) -> None:
        """Let the parameters show what is in the file."""
        for param, (_, value) in self._lent.items():
            param.data = value

    def give_back(self) -> None:
        """Let the parameters that still show the file have their own memory again, as it was."""
        for param, (own, _) in self._showing():
            param.data = own

    def take_over(self) -> None:
        """Give the parameters that still show the file memory of their own, with what it holds."""
        for param, _ in list(self._showing()):
            param.data = param.data.clone()
        self._lent.clear()

    def forget_own(self) -> None:
        """Let go of the values that the parameters had: all is known to fit."""
        self._lent = {param: (value, value) for param, (_, value) in self._lent.items()}

    def _showing(self) -> Iterator[tuple[nn.Parameter, tuple[Tensor, Tensor]]]:
        for param, (own, value) in self._lent.items():
            if param.data.data_ptr() == value.data_ptr():
                yield param, (own, value)


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names[value].append(name)
    return names


def _one_value(names: list[str], state: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor under these names, where it is the same; a tied weight may have others."""
    values = [state[name] for name in names if isinstance(state.get(name), Tensor)]
    places = {(value.data_ptr(), value.shape, value.stride()) for value in values}
    return values[0] if len(values) == len(names) and len(places) == 1 else None


def _can_show(param: nn.Parameter, value: Tensor) -> bool:
    """Whether a parameter that shows another tensor is as it would be after a load."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return False
    kinds = type(param) is nn.Parameter and type(value) is Tensor
    with without_function_modes():  # one of which has what is on meta said to be on the CPU
        places = param.is_cpu and value.is_cpu and param.layout is value.layout is torch.strided
    if not (kinds and places) or not value.numel():
        return False
    forms = (param.dtype, param.shape, param.stride()) == (value.dtype, value.shape, value.stride())
    return forms and storage_uses(param) == storage_uses(torch.empty(1))


# Of these a load may change the entries. Subclasses of a user's own may do anything when copied.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class ModuleSnapshot:
    """The attributes of a module before a load, and its submodules', and their tensors' values.

    A module's own hooks may do more than copy values: give buffers another size, set attributes,
    rename entries. So a load is not foreseen but undone.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        with_parameters: bool = True,
        without: Container[nn.Parameter] = (),
    ) -> None:
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]
        self._entries = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in _CONTAINERS
        ]
        self._scales = scales_of(module)
        params = [one for one in module.parameters() if with_parameters and one not in without]
        self._values = [
            (tensor, tensor.data, tensor.detach().clone())
            for tensor in (*params, *module.buffers())
            if not is_lazy(tensor)
        ]

    def restore(self) -> None:
        """Undo a load, right after it: attributes, entries and values."""
        for part, attributes in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
        for container, entries in self._entries:
            container.clear()
            container.extend(entries) if isinstance(container, list) else container.update(entries)
        set_scales(self._scales)
        self.restore_values()

    @torch.no_grad()
    def restore_values(self) -> None:
        """Restore only the values of parameters and buffers, in whatever the module is now."""
        for tensor, data, value in self._values:
            if tensor.shape != value.shape:
                tensor.data = data
            tensor.copy_(value)


def load_module_state(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool,
    left_out: Collection[str] = (),
    engine: DataParallelEngine | None = None,
    agree: Callable[[CheckpointError | None], None] = lambda error: None,
    paired: Mapping[str, Any] | None = None,
    lent: MappedParameters | None = None,
) -> ModuleSnapshot:
    """Load a full `state_dict` into a module by its own hooks, or leave the module as it was.

    Names in `left_out` may be missing and keep their value. `agree` is called with the error of
    what does not fit on this rank, or None, and raises if it does not on some. `paired` is state
    that a callback will load into the module next, checked with it; what `lent` can lend is not
    copied. Return a snapshot of the module as it was, but for what is in shards, or lent.
    """
    before = ModuleSnapshot(
        module, with_parameters=engine is None, without=lent.params if lent is not None else ()
    )
    missing: list[str] = []
    try:
        if lent is not None:
            lent.lend()
            state = lent.state
        own: Any = copy.copy(state)
        scales = pop_scales(module, own)
        with nullcontext() if engine is None else engine.full_values.loading(missing):
            agree(
                _load(module, own, strict, left_out, missing)
                or _paired_error(module, state, paired)
            )
        set_scales(scales)
    except BaseException:
        before.restore()
        if lent is not None:
            lent.give_back()
        raise
    return before


@torch.no_grad()
def load_into_shards(
    module: nn.Module, state: Mapping[str, Any], engine: DataParallelEngine
) -> None:
    """Copy into this rank's shards what they need of full tensors, which fit; each must call."""
    held = {param for flat in engine.flats for param in flat.params}
    params = module.state_dict(keep_vars=True)
    with engine.optimizer_view():
        for name, param in params.items():  # the last name of one that is tied counts
            value = state.get(name)
            if isinstance(value, Tensor) and param in held:
                flat, index = engine.owner(param)
                full = value.reshape(tuple(engine.full_shape(param)))  # torch exchanges () and (1,)
                flat.load(index, engine.split.local(param, full))
    publish_loaded(engine.flats)


def _load(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    left_out: Collection[str],
    missing: list[str],
) -> CheckpointError | None:
    """Load, append the names that kept their values, and return what does not fit."""
    wrong_shapes, wrong_kinds = list[str](), list[str]()
    with _watching(module, wrong_shapes, wrong_kinds):
        try:
            result = module.load_state_dict(state, strict=strict and not left_out)
        except RuntimeError as error:
            if _TORCH_REPORTS not in str(error):
                raise  # of a hook of the user's
            told = [line.strip().rstrip(".") for line in str(error).splitlines()[1:]]
            names = [line for line in told if "size mismatch for" not in line]
            found = weights_error(module, [*wrong_shapes, *wrong_kinds, *names] or told)
            if found is not None:
                found.__cause__ = error
            return found
    if wrong_kinds:
        return weights_error(module, wrong_kinds)
    absent: Sequence[str] = getattr(result, "missing_keys", ())
    if strict and left_out:
        unexpected = getattr(result, "unexpected_keys", ())
        lacking = [
            f"Missing key in state_dict: {name!r}" for name in absent if name not in left_out
        ]
        wrong = [*lacking, *(f"Unexpected key in state_dict: {name!r}" for name in unexpected)]
        if wrong:
            return weights_error(module, wrong)
    missing += absent
    return None


def _paired_error(
    module: nn.Module, state: Mapping[str, Any], paired: Mapping[str, Any] | None
) -> CheckpointError | None:
    """Return the error of a second state of the same module, where tensors of one name differ."""
    if paired is None:
        return None
    found = [f"{name!r} is not in current_model_state" for name in state if name not in paired]
    for prefix, part in module.named_modules():
        for name, tensor in named_tensors(part):
            full_name = f"{prefix}.{name}" if prefix else name
            value = paired.get(full_name)
            if isinstance(value, Tensor) and not is_lazy(tensor):
                what = f"{full_name!r} of current_model_state"
                found += shape_misfits(what, value.shape, tensor.shape)
                found += dtype_misfits(what, value.dtype, tensor.dtype)
    return weights_error(module, found)


@contextmanager
def _watching(module: nn.Module, wrong_shapes: list[str], wrong_kinds: list[str]) -> Iterator[None]:
    """Note the misfits of a state as it comes out of the module's own hooks."""

    def look(part: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in named_tensors(part):
            value = state.get(prefix + name)
            if not isinstance(value, Tensor) or is_lazy(tensor) or is_lazy(value):
                continue
            what = f"{prefix + name!r}"
            if value.numel() != 1 or tensor.numel() != 1:  # torch exchanges () and (1,)
                wrong_shapes.extend(shape_misfits(what, value.shape, tensor.shape))
            wrong_kinds.extend(dtype_misfits(what, value.dtype, tensor.dtype))

    with ExitStack() as hooks:
        for part in hookable(module):
            hooks.enter_context(part.register_load_state_dict_pre_hook(look))  # type: ignore[no-untyped-call]
        yield


def named_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module itself, without those of its children."""
    yield from part.named_parameters(recurse=False, remove_duplicate=False)
    yield from part.named_buffers(recurse=False, remove_duplicate=False)


_Path = tuple[Any, ...]


def join_shards(checkpoint: dict[str, Any], engine: DataParallelEngine) -> None:
    """Put full tensors, on the CPU, in the place of shards of stage 3; each rank must call."""
    read = {
        repr(path): (path, value)
        for path, value in _tensors(checkpoint, ())
        if isinstance(value, (ParameterShard, ShardView))
    }
    known = engine.numbered_shards()
    own = {
        path: known[place]
        for path, value in _tensors(checkpoint, ())
        if not isinstance(value, (ParameterShard, ShardView))
        and (place := (value.data_ptr(), value.numel())) in known
        and value.ndim == 1
    }
    told = engine.collectives.all_gather_object((sorted(read), own))
    _join_read(checkpoint, engine, read, [places for places, _ in told])
    found = {path: shard for _, theirs in told for path, shard in theirs.items()}
    for path, shard in found.items():
        full = engine.full_shard(shard)
        if engine.is_first:
            _put(checkpoint, path, full.to("cpu", copy=True))


def _join_read(
    checkpoint: dict[str, Any],
    engine: DataParallelEngine,
    own: Mapping[str, tuple[_Path, ParameterShard | ShardView]],
    every: Sequence[Sequence[str]],
) -> None:
    """Put full tensors in the place of tensors that were read from sharded parameters."""
    for place in sorted(set[str]().union(*every)):
        lacking = [rank for rank, theirs in enumerate(every) if place not in theirs]
        if lacking:
            raise ConfigError(
                f"The checkpoint's entry {place} was read of a sharded parameter, and rank "
                f"{lacking[0]} has not put it there, expected every rank to do so: its elements "
                f"lie on all of them."
            )
        path, value = own[place]
        full = value.full_tensor()
        _put(checkpoint, path, full.cpu() if engine.is_first else full.flatten()[:0])


def _tensors(value: Any, path: _Path) -> Iterator[tuple[_Path, Tensor]]:
    """Yield the path and value of each tensor with elements."""
    if isinstance(value, Tensor):
        if value.numel():
            yield path, value
    elif isinstance(value, MutableMapping):
        for key, child in value.items():
            yield from _tensors(child, (*path, key))
    elif isinstance(value, MutableSequence):
        for index, child in enumerate(value):
            yield from _tensors(child, (*path, index))


def _put(checkpoint: Any, path: _Path, full: Tensor) -> None:
    *outer, last = path
    for key in outer:
        checkpoint = checkpoint[key]
    checkpoint[last] = full
