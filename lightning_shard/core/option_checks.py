"""Checks that options are of their annotated types, before anything starts.

    @checked_options
    def __init__(self, block: int = 256, rounding: Literal["nearest", "stochastic"] = "nearest")

A bool is no number here, although Python thinks so, nor are NaN and infinity. Whole numbers of
numpy become Python's. Whether values make sense together is checked where they are used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, update_wrapper
from inspect import Parameter, signature
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from lightning_shard.errors import ConfigError

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")

_NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    dict: "a dictionary",
    timedelta: "a timedelta",
    Path: "a path",
    NoneType: "None",
}
_LISTS = (list, tuple, Sequence)


class _MisfitError(Exception):
    """A value is not of its annotated type."""


def checked_options(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a constructor, or a class method, check its options by their annotations.

    Options of other types than numbers, strings, bools, and lists and dictionaries of these are
    left to the function.

    Raises:
        ConfigError: When called, an option is not of its type.
    """
    of_function = signature(function)

    def checked(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = of_function.bind(owner, *args, **kwargs)
        except TypeError:
            return function(owner, *args, **kwargs)  # which says it better
        kind = owner if isinstance(owner, type) else type(owner)
        for name, hint in _checked_hints(function).items():
            if name in bound.arguments:
                value = bound.arguments[name]
                default = of_function.parameters[name].default
                bound.arguments[name] = _fitted_option(kind.__name__, name, value, hint, default)
        return function(*bound.args, **bound.kwargs)

    update_wrapper(checked, function)
    return checked


def check_fields(instance: Any) -> None:
    """Check a dataclass's fields as `checked_options` does, from its `__post_init__`."""
    owner: Any = type(instance)
    fields = vars(owner)
    for name, hint in _checked_hints(owner).items():
        value, default = getattr(instance, name), fields.get(name)
        fitted = _fitted_option(owner.__name__, name, value, hint, default)
        object.__setattr__(instance, name, fitted)


@cache
def _checked_hints(function: Any) -> dict[str, Any]:
    hints = {name: hint for name, hint in hints_of(function).items() if name != "return"}
    return {name: hint for name, hint in hints.items() if all(map(_is_known, _leaves(hint)))}


def _leaves(hint: Any) -> Iterator[Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType) or origin in _LISTS:
        for part in get_args(hint):
            yield from _leaves(part)
    elif origin is Literal:
        yield str
    else:
        yield origin or hint


def _is_known(leaf: Any) -> bool:
    return leaf in _NAMES or leaf in (Mapping, Ellipsis)


def _fitted_option(owner: str, name: str, value: Any, hint: Any, default: Any) -> Any:
    try:
        return _fitted(value, hint)
    except _MisfitError:
        usual = "" if default in (None, Parameter.empty) else f", such as {default!r}"
        advice = f" Write [{value!r}]." if _fits([value], hint) else ""
        raise ConfigError(
            f"{owner}: {name} must be {_described(hint)}{usual}, got {value!r} of type "
            f"{type(value).__name__}.{advice}"
        ) from None


def _fits(value: Any, hint: Any) -> bool:
    try:
        _fitted(value, hint)
    except _MisfitError:
        return False
    return True


def _fitted(value: Any, hint: Any) -> Any:
    """Return a value as Python's own type; raises _MisfitError."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return _fitted_any(value, get_args(hint))
    if origin in _LISTS:
        return _fitted_list(value, get_args(hint))
    if not _is_of(value, origin):
        raise _MisfitError
    if origin is int:
        return int(value)
    return value if origin is not float or isinstance(value, (int, float)) else float(value)


def _is_of(value: Any, kind: Any) -> bool:
    is_bool = type(value).__name__ in ("bool", "bool_")  # numpy's is no subclass of Python's
    if kind is bool:
        return is_bool
    if kind is int:
        return isinstance(value, Integral) and not is_bool
    if kind is float:
        return isinstance(value, Real) and not is_bool and isfinite(value)
    if kind is Literal:
        return isinstance(value, str)
    if kind is Path:
        return isinstance(value, PathLike)
    return isinstance(value, Mapping if kind is dict else kind)


def _fitted_any(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        try:
            return _fitted(value, hint)
        except _MisfitError:
            continue
    raise _MisfitError


def _fitted_list(value: Any, hints: Sequence[Any]) -> Any:
    """Return a list with checked entries; as in YAML, a list stands for a tuple of any length."""
    if not isinstance(value, (list, tuple)):
        raise _MisfitError
    fitted = [
        _fitted_any(entry, [hint for hint in hints if hint is not Ellipsis]) for entry in value
    ]
    return tuple(fitted) if isinstance(value, tuple) else fitted


def _described(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        said = sorted(map(_described, get_args(hint)), key=lambda one: one.startswith("a list"))
        return " or ".join(said)
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if origin in _LISTS:
        parts = dict.fromkeys(_described(part) for part in get_args(hint) if part is not Ellipsis)
        return f"a list, each entry {' or '.join(parts)}"
    return _NAMES[dict if origin is Mapping else origin]
