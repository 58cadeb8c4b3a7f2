"""The strategies on the page of the API: each argument's type, default, unit, schemes and meaning.

    python -m tests.docs.api_tables            write them

All of it is read from the classes: signatures, the fields that declare the options, and, of options
that only some ZeRO stages take, from what the constructors refuse.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import product
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import lightning_shard
from lightning_shard import fabric
from lightning_shard.core.schemes import SCHEMES
from lightning_shard.errors import ConfigError
from tests.docs.option_tables import meaning
from tests.docs.pages import ROOT, text_of

PAGE = "docs/api.md"
BEGIN, END = "<!-- python -m tests.docs.api_tables writes this -->\n", "<!-- until here -->\n"
OF_TRAINER: dict[str, Any] = {
    name: getattr(lightning_shard, one.class_name) for name, one in SCHEMES.items()
}
OF_FABRIC: dict[str, Any] = {
    name: getattr(fabric, one.class_name)
    for name, one in SCHEMES.items()
    if hasattr(fabric, one.class_name)
}
SOME_STAGES: dict[str, Sequence[Any]] = {
    "compression": ["fp16"],
    "offload": ["optimizer", "parameters"],
    "prefetch": [1],
    "reshard_after_forward": [2],
    "quantized_gathers": ["int8"],
    "gather_dtype": ["float8"],
}
"""By option that not every ZeRO stage takes, values one of which a stage that takes it does."""
UNITS = re.compile(
    r"\b(seconds|MB|share|ZeRO stage|bytes(?: a second)?|optimizer steps|steps|ranks|devices|nodes"
    r"|units|samples|microbatches|batches|epochs|values|stages|groups|models|parts|errors|calls"
    r"|dense averages|learning rates|operations(?: a second)?|elements|parameters|characters"
    r"|blocks)\b",
    re.IGNORECASE,
)
_MOST_NAMED = 4


def section() -> str:
    """Return what stands on the page between its two marks."""
    of_trainer = "\n".join(_classes(OF_TRAINER, lightning_shard.__name__))
    of_fabric = "\n".join(_classes(OF_FABRIC, fabric.__name__))
    return (
        f"## Strategies for the Trainer\n\n{of_trainer}\n## Strategies for Fabric\n\n"
        f"See [Fabric](fabric.md).\n\n{of_fabric}"
    )


def with_section(page: str) -> str:
    """Return the text of the page as the classes are."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def unit_of(text: str) -> str:
    """Return the first unit that an argument's text names; empty where it names none."""
    found = UNITS.search(" ".join(text.split()))
    named = found[1] if found else ""
    return named if named.startswith(("MB", "ZeRO")) else named.lower()


def is_number(hint: Any) -> bool:
    """Whether a type takes a number, or a time."""
    names = {getattr(one, "__name__", "") for one in _leaves(hint)}
    return bool(names & {"int", "float", "timedelta"})


def takers(option: str, kinds: dict[str, Any]) -> list[str]:
    """Return the schemes whose strategies take an option."""
    having = [name for name, kind in kinds.items() if option in inspect.signature(kind).parameters]
    return [name for name in having if _takes(kinds[name], option)]


def _takes(kind: Any, option: str) -> bool:
    for value, stage in product(SOME_STAGES.get(option, ()), ({}, {"zero_stage": 3})):
        with suppress(ConfigError, TypeError):
            kind(**{option: value}, **stage)
            return True
    return option not in SOME_STAGES


def _classes(kinds: dict[str, Any], package: str) -> Iterator[str]:
    """Yield the lines of each class: its names, what it says of itself, and its table once."""
    shown: dict[Any, str] = {}
    for kind in dict.fromkeys(kinds.values()):
        prefix = package.partition(".")[2]
        title = f"{prefix}.{kind.__name__}".strip(".")
        yield f"### {title}\n"
        yield f"`{package}.{kind.__name__}`: {' '.join(_summary(kind).split())}\n"
        first = shown.setdefault(kind.__init__, title)
        if first == title:
            yield from _table(kind, kinds)
            yield ""
        else:
            yield f"Its arguments are those of [{first}](#{first.replace('.', '').lower()}).\n"


def _summary(kind: Any) -> str:
    return re.split(r"\n(?:Args|Attributes|Raises):", inspect.getdoc(kind) or "")[0]


def _table(kind: Any, kinds: dict[str, Any]) -> Iterator[str]:
    group = kind.__init__.group
    hints = get_type_hints(group, include_extras=True)
    yield "| argument | meaning | type | default | unit | schemes |"
    yield "|---|---|---|---|---|---|"
    for one in fields(group):
        unit = unit_of(one.metadata["doc"]) if is_number(hints[one.name]) else ""
        cells = (
            f"`{one.name}`",
            meaning(one, PAGE),
            shown_type(hints[one.name]),
            f"`{_default(one.default)}`",
            unit,
            _named(takers(one.name, kinds), kinds),
        )
        yield f"| {' | '.join(cells)} |"


def _named(names: Sequence[str], kinds: dict[str, Any]) -> str:
    others = [name for name in kinds if name not in names]
    if not others:
        return "all"
    if len(others) <= _MOST_NAMED < len(names):
        return f"all but {_listed(others)}"
    return _listed(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _default(value: Any) -> str:
    return repr(value).replace("datetime.", "").replace("'", '"')


def shown_type(hint: Any) -> str:
    """Return a type in the words of a table, with its limits: `int` of at least 1 or `None`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([shown_type(parts[0]), *(limit.text for limit in hint.__metadata__)])
    if origin in (Union, UnionType):
        return " or ".join(map(shown_type, sorted(parts, key=lambda one: one is NoneType)))
    if origin is Literal:
        return " or ".join(f'`"{one}"`' for one in parts)
    if hint is NoneType:
        return "`None`"
    if getattr(origin, "__name__", "") == "Callable":
        return f"a function of `{_plain(parts[0][0])}` that returns `{_plain(parts[1])}`"
    return f"`{_plain(hint)}`"


def _plain(hint: Any) -> str:
    if hint is Ellipsis:
        return "..."
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "str"
    inside = ", ".join(map(_plain, get_args(hint)))
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return f"{name}[{inside}]" if inside else name


def _leaves(hint: Any) -> Iterator[Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for one in get_args(hint):
            yield from _leaves(one)
    elif origin is Annotated:
        yield from _leaves(get_args(hint)[0])
    else:
        yield hint


if __name__ == "__main__":
    (ROOT / PAGE).write_text(with_section(text_of(PAGE)), encoding="utf-8")
