"""Every public class and function says all its arguments: in help, in signatures, on the page."""

import inspect
import pydoc
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_type_hints

import pytest
import pytorch_lightning  # noqa: F401  (the strategies' twins need it)

import lightning_shard
from lightning_shard import ZeRO3Strategy, fabric, profiling, replay, testing
from lightning_shard.core.options import takes
from lightning_shard.data_parallel import compression
from lightning_shard.on_pytorch_lightning.mirror import original
from lightning_shard.strategies.options import DataParallelOptions
from tests.docs.api_tables import (
    OF_FABRIC,
    OF_TRAINER,
    PAGE,
    is_number,
    shown_type,
    takers,
    unit_of,
    with_section,
)
from tests.docs.pages import text_of

STRATEGIES = list(dict.fromkeys([*OF_TRAINER.values(), *OF_FABRIC.values()]))
OF_PYTORCH_LIGHTNING = "lightning_shard.on_pytorch_lightning"
ROOMS = (lightning_shard, fabric, profiling, testing, replay, compression)
NO_ARGUMENTS = {"COMPRESSORS", "Compression"}  # of the rooms' names: a table and a type
WITHOUT_UNIT = {"deviation", "micro", "momentum", "narrow", "number", "rank", "seed", "step"}
"""Numbers that count or measure nothing: a seed, a factor, which one of several."""
_BLOCK = re.compile(r"^::: (\S+)((?:\n {4}.*)*)", re.MULTILINE)
_MEMBERS = re.compile(r"members: \[(.*)\]")
_ENTRY = re.compile(r"^    \*{0,2}(\w+): (\S.*(?:\n {8}.*)*)", re.MULTILINE)
_CONTENTS = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", re.MULTILINE)


def found(path: str) -> Any:
    """Return what a dotted path means, a module or something in one."""
    try:
        return import_module(path)
    except ModuleNotFoundError:
        before, _, name = path.rpartition(".")
        return getattr(found(before), name)


def on_the_page() -> Iterator[Any]:
    """Yield what the page of the API has an entry for, and of modules their members."""
    for path, options in _BLOCK.findall(text_of(PAGE)):
        one = found(path)
        members = _MEMBERS.search(options)
        if not inspect.ismodule(one):
            yield one
        elif members is not None:
            yield from (getattr(one, name) for name in members[1].split(", "))
        else:
            yield from (kind for _, kind in inspect.getmembers(one, inspect.isclass))


IN_ROOMS = [
    getattr(room, name) for room in ROOMS for name in room.__all__ if name not in NO_ARGUMENTS
]
PUBLIC = list(dict.fromkeys([*STRATEGIES, *IN_ROOMS, *on_the_page()]))
WITH_ARGUMENTS = [
    one for one in PUBLIC if not (isinstance(one, type) and issubclass(one, Exception))
]


def explained(one: Any) -> dict[str, str]:
    """Return what the docstring of a class or function says of each argument."""
    lists = _CONTENTS.findall(f"{inspect.getdoc(one)}\n")
    return {name: text for some in lists for name, text in _ENTRY.findall(some)}


def arguments(one: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(one).parameters)


def test_every_public_name_is_on_the_page() -> None:
    shown, page = list(on_the_page()), text_of(PAGE)
    named = {f"{kind.__module__}.{kind.__name__}" for kind in STRATEGIES}
    for one in IN_ROOMS:
        assert one in shown or f"{one.__module__}.{one.__name__}" in named, one
    for kind in STRATEGIES:
        package = "fabric." if kind in OF_FABRIC.values() else ""
        assert f"\n### {package}{kind.__name__}\n" in page


def test_the_page_shows_the_strategies_as_they_are() -> None:
    assert text_of(PAGE) == with_section(text_of(PAGE)), "write it: python -m tests.docs.api_tables"


@pytest.mark.parametrize("one", WITH_ARGUMENTS, ids=lambda one: one.__name__)
def test_every_argument_has_a_text_and_a_type(one: Any) -> None:
    told = explained(one)
    assert [name for name in arguments(one) if not told.get(name)] == []
    untyped = [name for name, each in arguments(one).items() if each.annotation is each.empty]
    assert untyped == []


@pytest.mark.parametrize("one", WITH_ARGUMENTS, ids=lambda one: one.__name__)
def test_every_number_says_its_unit(one: Any) -> None:
    told, unsaid = explained(one), []
    for name, each in arguments(one).items():
        hint = each.annotation
        if is_number(hint) and name not in WITHOUT_UNIT and not unit_of(told[name]):
            unsaid.append((name, told[name]))
    assert unsaid == []


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__module__ + kind.__name__)
def test_the_help_of_a_strategy_lists_every_argument(kind: Any) -> None:
    """`help(ZeRO3Strategy)` listed none: only a class with a constructor of its own did."""
    shown = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    for name, text in explained(kind).items():
        assert f"{name}: {' '.join(text.split())}" in shown
    assert list(explained(kind)) == list(arguments(kind))


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__module__ + kind.__name__)
def test_the_signature_of_a_strategy_has_names_types_and_defaults(kind: Any) -> None:
    for shown in (arguments(kind), arguments(kind.__init__)):
        shown.pop("self", None)
        assert len(shown) > 10
        for one in shown.values():
            assert one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
            assert one.default is not one.empty
            assert one.annotation is not one.empty


@pytest.mark.parametrize("name", OF_TRAINER)
def test_a_strategy_on_pytorch_lightning_says_the_same(name: str) -> None:
    kind = OF_TRAINER[name]
    twin = getattr(import_module(OF_PYTORCH_LIGHTNING), kind.__name__)
    assert original(twin.__module__) == kind.__module__
    assert twin is not kind
    assert twin.__doc__ == kind.__doc__
    assert list(arguments(twin)) == list(arguments(kind))


class OfUser(ZeRO3Strategy):
    """Mine."""


class Silent(ZeRO3Strategy):
    @takes(DataParallelOptions)
    def __init__(self, options: DataParallelOptions) -> None:
        """Pass everything on."""


def test_a_users_class_has_the_arguments_of_its_base() -> None:
    assert explained(OfUser) == explained(ZeRO3Strategy)
    assert (inspect.getdoc(OfUser) or "").startswith("Mine.\n")
    assert inspect.signature(OfUser) == inspect.signature(ZeRO3Strategy)
    assert Silent.__doc__ is None


def test_the_schemes_of_an_option_are_those_that_do_not_refuse_it() -> None:
    assert takers("prefetch", OF_TRAINER) == ["zero3", "shard_fsdp"]
    assert takers("reshard_after_forward", OF_TRAINER) == ["zero3", "shard_fsdp"]
    assert takers("gather_dtype", OF_TRAINER) == ["zero3", "shard_fsdp", "hybrid_parallel"]
    assert takers("gather_dtype", OF_FABRIC) == ["zero3", "shard_fsdp"]
    assert takers("offload", OF_FABRIC) == ["zero1", "zero2", "zero3", "shard_fsdp"]
    in_few_bits = ["zero1", "zero2", "zero3", "shard_fsdp", "hybrid_parallel"]
    assert takers("quantized_gathers", OF_TRAINER) == in_few_bits
    assert takers("compression", OF_TRAINER) == ["shard_ddp", *in_few_bits, "local_sgd"]
    assert takers("min_ranks", OF_TRAINER) == ["elastic"]
    assert takers("min_ranks", OF_FABRIC) == []


def test_types_and_units_are_shown_in_words() -> None:
    hints = get_type_hints(DataParallelOptions, include_extras=True)
    assert shown_type(hints["prefetch"]) == "`int` of at least 0 or `None`"
    assert shown_type(hints["offload"]) == '`"optimizer"` or `"parameters"` or `None`'
    assert shown_type(hints["parallel_devices"]) == "`list[device]` or `None`"
    assert unit_of("MB up to which blocks are joined") == "MB"
    assert unit_of("Seconds that training waits") == "seconds"
    assert unit_of("A thing") == ""
    assert is_number(int | None)
    assert is_number(hints["timeout"])
    assert not is_number(list[int] | None)
