"""Options: each is declared once, as a field of a group or an argument of a constructor.

    @dataclass(frozen=True, kw_only=True)
    class ElasticOptions(SharedOptions):                    a group has those of its bases, too
        '''... Attributes:
            min_ranks: Ranks that training needs.           what it means: the field's "doc"
        '''

        min_ranks: AtLeastOne = 1                           name, type, what values, default

    class ElasticStrategy(DataParallelStrategy):
        @takes(ElasticOptions)
        def __init__(self, options: ElasticOptions) -> None:
            super().__init__(**options.part(SharedOptions))

Type checkers, `inspect.signature`, LightningCLI and editors see the group's fields as arguments of
the constructor. A value of another type or out of range is refused by name when the object is made;
what several options may not be together the group's `__post_init__` says, after these. A
constructor with arguments of its own has the same checks by `checked_options`.

A bool is no number here, although Python thinks so, nor are NaN and infinity. Whole numbers of
numpy become Python's. A class stands for those of its name in both roots of Lightning.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, update_wrapper
from inspect import Parameter, Signature, cleandoc, get_annotations, signature
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import is_protocol

from lightning_shard.errors import ConfigError

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
G = TypeVar("G")

_NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    dict: "a dictionary",
    Mapping: "a dictionary",
    Path: "a path",
    NoneType: "None",
    Callable: "a function",
}
_LISTS = (list, tuple, Sequence)
_MOST_MEANT = 4
_MOST_RANKS = 1024
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


class _MisfitError(Exception):
    """A value is not of its annotated type, or out of its range."""


@dataclass(frozen=True)
class Limit:
    """What values of a type an option takes: `Annotated[int, Limit("above 2", lambda n: n > 2)]`.

    Attributes:
        text: What follows the type's name in a message.
        holds: Whether a value of the type is one; it may raise a ConfigError that says more.
    """

    text: str
    holds: Callable[[Any], bool] = field(default=lambda value: True, repr=False)


def check_num_ranks(number: int) -> None:
    """Refuse more ranks than a host can start, before it tries."""
    if number > _MOST_RANKS:
        raise ConfigError(f"got {number} ranks on one host, expected at most {_MOST_RANKS}.")


AtLeastZero: TypeAlias = Annotated[int, Limit("of at least 0", lambda number: number >= 0)]
AtLeastOne: TypeAlias = Annotated[int, Limit("of at least 1", lambda number: number >= 1)]
AxisSize: TypeAlias = Annotated[
    int,
    Limit("of at least 1, or -1 for what the others leave", lambda size: size >= 1 or size == -1),
]
ClassNames: TypeAlias = Annotated[list[str], Limit("such as ['Block']", bool)]
"""Names of the classes of modules, one at least."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options; see the module's first lines."""

    def __init_subclass__(cls) -> None:
        """Give each field what the class's docstring says of it."""
        said = dict(_ENTRY.findall(cleandoc(cls.__doc__ or "")))
        for name in get_annotations(cls):
            own: Any = vars(cls).get(name, MISSING)
            declared: Field[Any] = own if isinstance(own, Field) else field(default=own)
            declared.metadata = MappingProxyType({"doc": said.get(name, "")})
            setattr(cls, name, declared)

    def __post_init__(self) -> None:
        """Refuse what no option can be by itself."""
        check_fields(self)

    def part(self, group: "type[Options]") -> dict[str, Any]:
        """Return by name those of the options that another group has."""
        mine = {one.name for one in fields(self)}
        return {name: getattr(self, name) for name in names_of(group) if name in mine}


def names_of(group: type[Options]) -> list[str]:
    """Return the names of a group's options."""
    return [one.name for one in fields(group)]


def takes(
    group: Callable[P, G],
) -> Callable[[Callable[[S, G], None]], Callable[Concatenate[S, P], None]]:
    """Make a constructor that is given a group of options one that takes each by its name."""

    def decorate(constructor: Callable[[S, G], None]) -> Callable[Concatenate[S, P], None]:
        def flat(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            with told_by(type(owner)):
                _check_places(group, args)
                constructor(owner, group(*args, **kwargs))

        update_wrapper(flat, constructor)
        owner, *_ = signature(constructor).parameters.values()
        _show(flat, [owner, *signature(group).parameters.values()], group)
        flat.group = group  # type: ignore[attr-defined]
        return flat

    return decorate


def checked_options(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a constructor, or a class method, check its options by their annotations.

    Options of types that are no classes, such as Any, are left to the function.
    """
    of_function = signature(function)

    def checked(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = of_function.bind(owner, *args, **kwargs)
        except TypeError:
            return function(owner, *args, **kwargs)  # which says it better
        with told_by(owner if isinstance(owner, type) else type(owner)):
            for name, hint in _checked_hints(function).items():
                if name in bound.arguments:
                    default = of_function.parameters[name].default
                    given = bound.arguments[name]
                    bound.arguments[name] = _fitted_option(name, given, hint, default)
        return function(*bound.args, **bound.kwargs)

    update_wrapper(checked, function)
    _show(checked, of_function.parameters.values(), function)
    return checked


@contextmanager
def told_by(kind: type) -> Iterator[None]:
    """Let an error of options begin with the name of the class that they were given to."""
    try:
        yield
    except ConfigError as error:
        begin = f"{kind.__name__}: "
        if not str(error).startswith(begin):
            error.args = (f"{begin}{error}",)
        raise


def check_fields(instance: Any) -> None:
    """Check a dataclass's fields, and put values of Python's own types in their place."""
    owner: Any = type(instance)
    hints = _checked_hints(owner)
    for one in fields(instance):
        if one.name in hints:
            given = getattr(instance, one.name)
            fitted = _fitted_option(one.name, given, hints[one.name], one.default)
            object.__setattr__(instance, one.name, fitted)


def explained(doc: str | None, constructor: Callable[..., None]) -> str | None:
    """Return the docstring of a class with what its options mean, where they are a group."""
    group = getattr(constructor, "group", None)
    if group is None or doc is None:
        return doc
    args = "\n".join(f"    {one.name}: {one.metadata['doc']}" for one in fields(group))
    before, raises, after = cleandoc(doc).partition("\nRaises:")
    return f"{before.rstrip()}\n\nArgs:\n{args}\n{raises}{after}"


def _show(function: Any, parameters: Iterable[Parameter], declaration: Any) -> None:
    """Give a function these parameters, with the types of a declaration but for their limits."""
    hints = get_type_hints(declaration)
    typed = [one.replace(annotation=hints.get(one.name, one.annotation)) for one in parameters]
    function.__signature__, function.__annotations__ = Signature(typed), {"return": None, **hints}


def _check_places(group: Any, args: Sequence[Any]) -> None:
    """Refuse what stands in another option's place, and say which could be meant."""
    hints, in_places = _checked_hints(group), [one.name for one in fields(group) if not one.kw_only]
    for name, value in zip(in_places, args, strict=False):
        if name in hints and not _fits(value, hints[name]):
            own_first = [one for kind in group.__mro__ for one in get_annotations(kind)]
            meant = [
                f"{one}={value!r}"
                for one in own_first
                if one not in in_places and one in hints and _fits(value, hints[one])
            ]
            such_as = f", such as {' or '.join(meant[:_MOST_MEANT])}" if meant else ""
            raise ConfigError(
                f"{value!r} stands in the place of {name}, which must be "
                f"{_described(hints[name])}. Options are given by name{such_as}."
            )


@cache
def _checked_hints(declaration: Any) -> dict[str, Any]:
    hints = get_type_hints(declaration, include_extras=True)
    hints.pop("return", None)
    return {name: hint for name, hint in hints.items() if all(map(_is_known, _leaves(hint)))}


def _leaves(hint: Any) -> Iterator[Any]:
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _leaves(get_args(hint)[0])
    elif origin in (Union, UnionType) or origin in _LISTS:
        for part in get_args(hint):
            yield from _leaves(part)
    else:
        yield origin or hint


def _is_known(leaf: Any) -> bool:
    is_class = isinstance(leaf, type) and leaf not in (Any, object)
    return leaf in (Literal, Ellipsis) or (is_class and not is_protocol(leaf))


def _fitted_option(name: str, value: Any, hint: Any, default: Any) -> Any:
    try:
        return _fitted(value, hint)
    except _MisfitError:
        usual = "" if default in (None, Parameter.empty, MISSING) else f", such as {default!r}"
        advice = f" Write [{value!r}]." if _fits([value], hint) else ""
        raise ConfigError(
            f"{name} must be {_described(hint)}{usual}, got {value!r} of type "
            f"{type(value).__name__}.{advice}"
        ) from None


def _fits(value: Any, hint: Any) -> bool:
    try:
        _fitted(value, hint)
    except (_MisfitError, ConfigError):
        return False
    return True


def _fitted(value: Any, hint: Any) -> Any:
    """Return a value as Python's own type; raises _MisfitError."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        fitted = _fitted(value, parts[0])
        if not all(limit.holds(fitted) for limit in parts[1:]):
            raise _MisfitError
        return fitted
    if origin in (Union, UnionType):
        return _fitted_any(value, parts)
    if origin in _LISTS:
        return _fitted_list(value, origin, parts)
    if not _is_of(value, origin, parts):
        raise _MisfitError
    if origin is int:
        return int(value)
    return value if origin is not float or isinstance(value, (int, float)) else float(value)


def _is_of(value: Any, kind: Any, parts: Sequence[Any]) -> bool:
    is_bool = type(value).__name__ in ("bool", "bool_")  # numpy's is no subclass of Python's
    if kind is bool:
        return is_bool
    if kind is int:
        return isinstance(value, Integral) and not is_bool
    if kind is float:
        return isinstance(value, Real) and not is_bool and isfinite(value)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind in (Path, dict):
        return isinstance(value, PathLike if kind is Path else Mapping)
    return isinstance(value, kind) or kind.__name__ in [one.__name__ for one in type(value).__mro__]


def _fitted_any(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        try:
            return _fitted(value, hint)
        except _MisfitError:
            continue
    raise _MisfitError


def _fitted_list(value: Any, kind: Any, hints: Sequence[Any]) -> Any:
    """Return a list with checked entries; as in YAML, a list stands for a tuple of its type."""
    if not isinstance(value, (list, tuple)):
        raise _MisfitError
    if kind is tuple and Ellipsis not in hints and len(value) != len(hints):
        raise _MisfitError
    fitted = [
        _fitted_any(entry, [hint for hint in hints if hint is not Ellipsis]) for entry in value
    ]
    return tuple(fitted) if kind is tuple or isinstance(value, tuple) else fitted


def _described(hint: Any) -> str:
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return " ".join([_described(parts[0]), *(limit.text for limit in parts[1:])])
    if origin in (Union, UnionType):
        said = sorted(map(_described, parts), key=lambda one: one.startswith("a list"))
        return " or ".join(said)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in _LISTS:
        kinds = dict.fromkeys(_described(part) for part in parts if part is not Ellipsis)
        return f"a list, each entry {' or '.join(kinds)}"
    article = "an" if origin.__name__[0] in "AEIOU" else "a"
    return _NAMES.get(origin, f"{article} {origin.__name__}")
