"""Placeholders for values of other stages: tensors that know everything but their elements.

    stage 0    ids ──> embedding ──> dropout ──> block 0 ──> block 1 ──send──┐
    stage 1    ids ──> Placeholder ──> Placeholder ──> (skipped) ────────────> block 2 ──> block 3

A stage runs the user's whole step, but has only its own parameters. What is computed from a
`Placeholder` is one again, without arithmetic or memory. So the arguments of a stage's first block
that are placeholders are exactly those that have to be received; from then on they have a `value`.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.core.states import Asker, asker, having
from lightning_shard.core.tensor_calls import (
    MOVES_MEMORY,
    OF_MEMORY,
    OF_TRAINING,
    SET_DATA,
    Args,
    Function,
    Kwargs,
    SeesCalls,
    SeesOperations,
    found_in,
    map_only,
    memory_refused,
    name_of,
    written_by,
)
from lightning_shard.errors import ConfigError

_UPDATES_STATISTICS = ("batch_norm",)  # of another stage: they are its own to keep
_MAX_MADE = 4096
_made: dict[Any, Any] = {}  # formats of what operations make on meta, by what they are given
_written_to: ContextVar[dict[str, None] | None] = ContextVar("written_to", default=None)
_is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)
_given: ContextVar[list[Tensor] | None] = ContextVar("given", default=None)
_born: ContextVar[list["weakref.ref[Placeholder]"] | None] = ContextVar("born", default=None)


def alone() -> AbstractContextManager[object]:
    """Call a block inside to see the shapes of what it returns, where peers call nothing."""
    return having(_is_alone, value=True)


def is_alone() -> bool:
    """Whether a call may exchange nothing with peers, since only its result's shapes count."""
    return _is_alone.get()


NEED_ELEMENTS: list[Callable[[], bool]] = []
"""Say whether shapes do not suffice now for what is computed; others register them."""


class OtherStageError(ConfigError):
    """A value of another stage, computed from `origins`, was used as if it were known here."""

    def __init__(self, message: str, origins: frozenset[str]) -> None:
        super().__init__(message)
        self.origins = origins


class Placeholder(SeesCalls, SeesOperations):
    """A tensor whose elements are known on another stage only.

    Attributes:
        like: A meta tensor of the same shape and format.
        place: The device that the placeholder seems to be on.
        origin: Name of a parameter that it was computed from, for error messages.
        origins: Names of all parameters and results of blocks that it was computed from.
        value: The tensor that it stands for, while that is known on this stage; else None.
        is_parameter: Whether it stands for a parameter, or is a view of such.
        param: The parameter itself, which knows whether it is trained, and has the attributes that
            user code gives to this; else None.
    """

    __slots__ = "_is_param", "is_parameter", "like", "origin", "origins", "param", "place", "value"
    is_parameter: bool
    param: torch.nn.Parameter | None
    like: Tensor
    place: torch.device
    origin: str
    origins: frozenset[str]
    value: Tensor | None
    _is_param: bool

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, origin: str) -> "Placeholder":
        """Make a placeholder of the shape and format of `like`, a meta tensor, on `device`."""
        with torch.inference_mode(mode=False):  # or it could be no view, and had no version
            tensor: Placeholder = Tensor._make_wrapper_subclass(
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
            )
        tensor.like, tensor.place, tensor.origin, tensor.value = like, device, origin, None
        tensor.origins, tensor.is_parameter, tensor.param = frozenset((origin,)), False, None
        born = _born.get()
        if born is not None:
            born.append(weakref.ref(tensor))
        return tensor

    @classmethod
    def of(cls, value: Tensor, shape: Sequence[int], origin: str) -> "Placeholder":
        """Make a placeholder of a parameter or buffer with the format and device of `value`.

        Of another placeholder of a parameter, a part say, it is one of the same parameter.
        """
        made = cls(torch.empty(shape, dtype=value.dtype, device="meta"), value.device, origin)
        if isinstance(value, Placeholder):
            made.is_parameter, made.param = value.is_parameter, value.param
        elif isinstance(value, torch.nn.Parameter):
            made.is_parameter, made.param = True, value
        if made.param is not None:
            made._is_param, made.__dict__ = True, vars(made.param)
        return made

    @property
    def __deepcopy__(self) -> Any:  # before what an attribute says, which copies the parameter
        return partial(Tensor.__deepcopy__, self)

    def again(self) -> "Placeholder":
        """Return another placeholder with the same metadata, for a value of its own."""
        other = Placeholder(self.like, self.place, self.origin)
        other.origins = self.origins
        return other

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(of={self.origin!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @override
    def called(cls, func: Function, types: Sequence[type], args: Args, kwargs: Kwargs) -> Any:
        """Compute with the values that are known, which autograd sees."""
        if func == SET_DATA and isinstance(args[0], Placeholder):
            _note_write(args[0])
        elif func == SET_DATA and is_placeholder(args[1]):
            with torch.no_grad():  # as torch sets data
                return args[0].copy_(args[1])  # refused, since the elements are not known
        param = getattr(args[0], "param", None) if func in OF_TRAINING and args else None
        if param is not None:
            result = func(param, *args[1:], **kwargs)
            return args[0] if result is param else result
        if func in _OF_GRADIENT and is_placeholder(args[0]):
            return RemovableHandle(OrderedDict()) if func == Tensor.register_hook else None
        args = tuple(map(_known, args))
        kwargs = {key: _known(one) for key, one in kwargs.items()}
        if any(map(is_placeholder, args)):
            if name_of(func) in _OF_ELEMENTS:
                raise memory_refused(func, args[0], "another stage has its elements")
            if any(needs() for needs in NEED_ELEMENTS):
                raise _asked_for(*_sources((args, kwargs)), f"{name_of(func)} in a transform")
            note_given((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @override
    def dispatched(cls, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Compute shape and format only, and refuse what needs or would write elements."""
        given = (args, kwargs)
        sources, origins = _sources(given)
        source = sources[0]
        _refuse_writes(func, *given, source.origin, origins)
        _draw(func, given)
        device = given[1].get("device") or source.device
        if "device" in given[1]:
            given[1]["device"] = torch.device("meta")
        try:
            result = _on_meta(func, given)
        except (RuntimeError, NotImplementedError) as error:
            raise _asked_for(sources, origins, f"{func}: {error}") from error
        known = {id(one.like): one for one in sources}
        is_view = source.is_parameter and _returns_view(func)

        def wrap(tensor: Tensor) -> Tensor:
            same = known.get(id(tensor))
            if same is not None:
                return same
            made = cls(tensor, torch.device(device), source.origin)
            made.origins, made.is_parameter = origins, is_view
            return made

        return map_only(Tensor, wrap, result)


def _sources(given: Any) -> tuple[list[Placeholder], frozenset[str]]:
    """Return the placeholders among values, and the names of all that these are computed from."""
    found = found_in(Placeholder, given)
    return found, frozenset().union(*(one.origins for one in found))


def _asked_for(
    sources: Sequence[Placeholder], origins: frozenset[str], reason: str
) -> OtherStageError:
    return OtherStageError(
        f"Compute this from the batch, or inside a block, or use strategy='zero3': code "
        f"outside of the blocks asks for the elements of a value that is computed from "
        f"{sources[0].origin!r} on another stage of the pipeline, expected code there to need "
        f"its shape only. ({reason})",
        origins,
    )


@contextmanager
def in_any_order() -> Iterator[None]:
    """Compute without elements inside: no order of additions could make a result another one.

    Torch's operations on meta warn or raise for the device that knows no fixed order, whichever
    device there is: `Trainer(deterministic=True)` refused `histc` for a GPU on the CPU.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


class _Format(NamedTuple):
    """What an operation on meta goes by, of a tensor."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Format":
        """Return the format of a tensor, and of its placeholder."""
        like = tensor.like if isinstance(tensor, Placeholder) else tensor
        if type(like) not in (Tensor, nn.Parameter):  # a fake one, say
            raise TypeError(f"unknown class of tensors: {type(like)}")
        return cls(like.shape, like.stride(), like.dtype)

    def empty(self) -> Tensor:
        """Make a meta tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _on_meta(func: Function, given: tuple[Args, Kwargs]) -> Any:
    """Return what an operation makes on meta, as the last time where it is given such tensors."""
    try:
        key = func, torch.get_default_dtype(), _hashable(given)
        if key in _made:
            return map_only(_Format, _Format.empty, _made[key])
    except (TypeError, RuntimeError):  # no value that is known again, or a tensor without strides
        return _computed_on_meta(func, given)[0]
    result, is_new = _computed_on_meta(func, given)
    if is_new and len(_made) < _MAX_MADE:
        _made[key] = map_only(Tensor, _Format.of, result)
    return result


def _computed_on_meta(func: Function, given: tuple[Args, Kwargs]) -> tuple[Any, bool]:
    """Return what an operation makes, and whether none of it is a tensor that was given."""
    args, kwargs = map_only(Tensor, _as_meta, given)
    with in_any_order():
        result = func(*args, **kwargs)
    old = set(map(id, found_in(Tensor, (args, kwargs))))
    return result, old.isdisjoint(map(id, found_in(Tensor, result)))


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Format.of(value)
    if isinstance(value, dict):
        value = *value.items(), dict
    return tuple(map(_hashable, value)) if type(value) in (tuple, list) else (type(value), value)


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor.like if isinstance(tensor, Placeholder) else tensor.to("meta")


def _known(value: Any) -> Any:
    if isinstance(value, Placeholder):
        return value if value.value is None else value.value
    if type(value) in (tuple, list):
        return type(value)(map(_known, value))
    return value


def _draw(func: Any, given: Any) -> None:
    """Draw the random numbers that the stage with the elements draws, so that later ones agree."""
    # The elements do not matter for how many are drawn, but they have to be probabilities.
    if torch.Tag.nondeterministic_seeded not in func.tags or _drops_nothing(func, *given):
        return

    def element(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Placeholder):
            return tensor
        half = torch.empty_like(tensor.like, device=tensor.device)
        return half.fill_(0.5 if half.is_floating_point() else 1)

    args, kwargs = map_only(Tensor, element, given)
    func(*args, **kwargs)


def _drops_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is an attention without dropout, which draws nothing."""
    names = [one.name for one in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


_OF_ELEMENTS = OF_MEMORY | MOVES_MEMORY | {"tolist"}
_OF_GRADIENT: Any = (Tensor.register_hook, Tensor.retain_grad)  # which its own stage has


@cache
def _returns_view(func: Any) -> bool:
    """Whether an operation returns views of its arguments."""
    return any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)


def _note_write(target: Placeholder) -> None:
    written = _written_to.get()
    if target.is_parameter and written is not None:
        written[target.origin] = None


def _refuse_writes(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    origin: str,
    origins: frozenset[str],
) -> None:
    """Raise where unknown elements would be written into a tensor whose elements are known."""
    targets = written_by(func, args, kwargs)
    for target in targets:
        if isinstance(target, Placeholder):
            _note_write(target)
    known = [target for target in targets if not isinstance(target, Placeholder)]
    if known and not any(name in str(func) for name in _UPDATES_STATISTICS):
        raise OtherStageError(
            f"Make a new tensor (torch.cat, torch.where) instead of writing into one, or do so "
            f"inside a block: {func} writes a value that is computed from {origin!r} on "
            f"another stage of the pipeline into a tensor of shape {tuple(known[0].shape)}, "
            f"expected it to be an argument of the blocks.",
            origins,
        )


def births() -> AbstractContextManager[list["weakref.ref[Placeholder]"]]:
    """Note every `Placeholder` that this thread makes inside."""
    return having(_born, [])


def tensors_given() -> AbstractContextManager[list[Tensor]]:
    """Note the tensors with gradients, which are not known here, that other stages compute with."""
    return having(_given, [])


def note_given(values: Any) -> None:
    """Note that other stages compute with these values, for `tensors_given`."""
    given = _given.get()
    if given is not None and torch.is_grad_enabled():
        found = found_in(Tensor, values)
        given += [one for one in found if not isinstance(one, Placeholder) and one.requires_grad]


def parameters_written() -> AbstractContextManager[dict[str, None]]:
    """Note the names of parameters of other stages that this thread writes to inside."""
    return having(_written_to, {})


@having(asker, value=Asker.ENGINE)
def stands_in(module: nn.Module, arguments: object) -> bool:
    """Whether a module's call only stands for what another stage computes.

    Its arguments are then placeholders, or its weights: behind a tied embedding, which the last
    stage has as well, a block of the first stage is given elements.
    """
    weight = next(module.parameters(), None)
    given = (isinstance(one, Placeholder) for one in tree_leaves(arguments))
    return is_placeholder(weight) or any(given)


def is_placeholder(value: object) -> bool:
    """Whether a value is another stage's, and not known on this one."""
    return isinstance(value, Placeholder) and value.value is None
