"""Options in groups inside, and flat outside: in Python, in YAML and on a command line.

    class ScheduleOptions(TypedDict, total=False)      names, types and what they mean, for callers
    class ScheduleConfig(OptionGroup)                  defaults, and what cannot be

    @takes(RunConfig, ScheduleConfig)
    def __init__(self, **options: Unpack[SomeOptions]) -> None:
        stages = ScheduleConfig.of(options)            frozen and checked
        super().__init__(**part(RunOptions, options))

`inspect.signature` of such a constructor shows each option with its type and its default, after
Lightning's own arguments, which may be positional. LightningCLI reads the signature, and the
explanations from the docstring of the class.

The metaclass of the strategies checks option names, and knows a class's counterpart. A misspelt
constructor option is one clear error, with the name that was probably meant. Of a strategy that a
Trainer of the other root of Lightning has taken (see `counterparts`), `isinstance` still says what
it was made as.
"""

import difflib
import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import update_wrapper
from inspect import Parameter, Signature
from typing import Any, Self, TypeVar, cast, get_args, get_type_hints

from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import get_original_bases

from lightning_shard.core.option_checks import checked_options
from lightning_shard.errors import ConfigError
from lightning_shard.on_pytorch_lightning.mirror import original

F = TypeVar("F", bound=Callable[..., None])
T = TypeVar("T")
_COLLECTING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that belong together, with their defaults; checked when they are made."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make the group of those of `options` that belong to it."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: options[name] for name in names if name in options})


def part(group: type[T], options: Mapping[str, object]) -> T:
    """Return those of `options` that the typed dictionary `group` has."""
    names = get_type_hints(group)
    return cast(T, {name: value for name, value in options.items() if name in names})


def takes(*groups: type[OptionGroup], of: type = ParallelStrategy) -> Callable[[F], F]:
    """Give a constructor with `**options: Unpack[SomeTypedDict]` its flat signature, and checks.

    Args:
        groups: They have the typed dictionary's options, except Lightning's, with the defaults.
        of: Lightning's strategy that the constructor's class derives from.

    Raises:
        ConfigError: When the constructor is called, an option is not of its type.
    """

    def decorate(constructor: F) -> F:
        declared = _declared(constructor)
        hints = get_type_hints(declared)
        flat = Signature(list(_parameters(groups, hints, of)))
        others = hints.keys() ^ (flat.parameters.keys() - {"self"})
        assert not others, f"{declared.__name__} and its groups differ in {others}"

        def named(*args: Any, **options: Any) -> None:
            given = flat.bind(*args, **options).arguments
            constructor(given.pop("self"), **given)

        update_wrapper(named, constructor)
        named.__signature__ = flat  # type: ignore[attr-defined]
        named.__annotations__ = {**hints, "return": None}
        named.declared_options = declared  # type: ignore[attr-defined]
        return cast(F, checked_options(named))

    return decorate


def option_names(kind: type) -> list[str]:
    """Return the names of a class's options; of one that passes others on, its parents', too."""
    names: dict[str, None] = {}
    for one in kind.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
        names |= {each.name: None for each in parameters if each.kind not in _COLLECTING}
        if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters):
            break
    return list(names)


def without_self(constructor: Callable[..., None]) -> Signature:
    """Return what one passes to a class that has this constructor."""
    of_constructor = inspect.signature(constructor)
    return of_constructor.replace(parameters=list(of_constructor.parameters.values())[1:])


def explained(doc: str | None, constructor: Callable[..., None]) -> str | None:
    """Return the docstring of a class with what its options mean, where they are in groups."""
    declared = getattr(constructor, "declared_options", None)
    if declared is None or doc is None:
        return doc
    known = _explanations(declared)
    names = [name for name in inspect.signature(constructor).parameters if name in known]
    args = "\n".join(f"    {name}: {known[name]}" for name in names)
    before, raises, after = inspect.cleandoc(doc).partition("\nRaises:")
    return f"{before.rstrip()}\n\nArgs:\n{args}\n{raises}{after}"


def _declared(constructor: Callable[..., None]) -> type:
    """Return the typed dictionary that a constructor takes."""
    (declared,) = get_args(get_type_hints(constructor)["options"])
    return cast(type, declared)


def _parameters(
    groups: tuple[type[OptionGroup], ...], hints: Any, base: Any
) -> Iterator[Parameter]:
    of_lightning = inspect.signature(base.__init__).parameters.values()
    kind = Parameter.KEYWORD_ONLY
    of_groups = [
        Parameter(field.name, kind, default=field.default)
        for group in groups
        for field in fields(group)
    ]
    for parameter in (*of_lightning, *of_groups):
        yield parameter.replace(annotation=hints.get(parameter.name, Parameter.empty))


def _explanations(declared: Any) -> dict[str, str]:
    """Return what each option of a typed dictionary means; its own words go before its bases'."""
    found: dict[str, str] = {}
    for base in get_original_bases(declared):
        if base is not declared and hasattr(base, "__total__"):
            found |= _explanations(base)
    _, _, attributes = inspect.cleandoc(declared.__doc__ or "").partition("Attributes:\n")
    return found | dict(_ENTRY.findall(attributes))


class OptionNames(ABCMeta):
    """Checks keyword arguments against the constructor's signature before calling it.

    An instance keeps what it was made with, as `given_options`. The signature of a class is its
    constructor's, and its docstring says what the options mean.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        """Make a strategy's class."""
        constructor = namespace.get("__init__")
        if constructor is not None:
            doc = explained(namespace.get("__doc__"), constructor)
            namespace = {**namespace, "__doc__": doc, "__signature__": without_self(constructor)}
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct, or raise ConfigError for an option that the class does not have."""
        known = option_names(cls)
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{cls.__name__} has no option {name!r}; it has {', '.join(known)}.{hint}"
                )
        made = super().__call__(*args, **kwargs)
        made.given_options = args, kwargs
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or any(
            (original(kind.__module__), kind.__qualname__)
            == (original(cls.__module__), cls.__qualname__)
            for kind in type(instance).__mro__
        )
