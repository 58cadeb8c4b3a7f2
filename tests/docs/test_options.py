"""The tables of options have every option, with its default, and no other."""

import ast
import inspect
import re
from typing import Any

import pytest

from lightning_shard.core.schemes import SCHEMES
from lightning_shard.data_parallel import compression
from lightning_shard.data_parallel.compression import COMPRESSORS
from lightning_shard.tensor_parallel.styles import STYLES
from tests.docs import low_precision_table
from tests.docs.option_tables import OF_SOME, PAGES, with_tables
from tests.docs.pages import quotes, tables, text_of

LIGHTNINGS = {
    "self",
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
}
STRATEGIES = "docs/strategies.md"
_NO_DEFAULT = object()  # in a table whose text says it


def options_of(name: str) -> dict[str, Any]:
    """Return the options that a page's tables list, with the defaults that they show."""
    found: dict[str, Any] = {}
    for table in tables(name):
        if table.head[0] == "option":
            for row in table.rows:
                for quote in quotes(row[0]):
                    option, is_shown, default = quote.partition("=")
                    found[option] = ast.literal_eval(default) if is_shown else _NO_DEFAULT
    return found


def parameters_of(kind: type) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name not in LIGHTNINGS
    }


@pytest.mark.parametrize("name", PAGES)
def test_the_options_of_a_page_are_those_of_its_strategy(name: str) -> None:
    listed, parameters = options_of(name), parameters_of(PAGES[name])
    assert listed.keys() <= parameters.keys()
    if name not in OF_SOME:
        assert parameters.keys() <= listed.keys() | options_of("docs/strategies.md").keys()
    for option, default in listed.items():
        assert default is _NO_DEFAULT or default == parameters[option], option


@pytest.mark.parametrize("name", sorted({*PAGES} - {*OF_SOME, "docs/plan.md", STRATEGIES}))
def test_a_page_says_which_options_of_data_parallel_its_strategy_takes(name: str) -> None:
    """Seven pages named one or two that it lacks, of four to nine."""
    (shared,) = [table.rows for table in tables(STRATEGIES) if "`units=None`" in table.rows[0]]
    options = [quotes(row[0])[0].partition("=")[0] for row in shared]
    (last,) = re.findall(r"#options-of-data-parallel\)\s+down\s+to\s+`(\w+)`", text_of(name))
    told, parameters = options[: options.index(last) + 1], parameters_of(PAGES[name]).keys()
    assert {*told} <= parameters
    assert parameters & {*options} <= {*told, *options_of(name)}


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_say_what_the_options_are_declared_with(name: str) -> None:
    assert text_of(name) == with_tables(name), "write them: python -m tests.docs.option_tables"


def test_the_settings_of_compressors_are_those_of_their_classes() -> None:
    (table,) = [one for one in tables("docs/compression.md") if one.head[0] == "class"]
    assert len(table.rows) == len(COMPRESSORS)
    for row in table.rows:
        (name,) = quotes(row[0])
        shown = dict(setting.split("=") for setting in quotes(row[1]))
        parameters = parameters_of(getattr(compression, name))
        parameters = {key: value for key, value in parameters.items() if key in shown or shown}
        assert {key: ast.literal_eval(value) for key, value in shown.items()} == (
            parameters if shown else {}
        )


def test_every_scheme_is_in_the_readme_and_has_its_traffic() -> None:
    for scheme in SCHEMES:
        assert f"`{scheme}`" in text_of("README.md")
        assert f"`{scheme}`" in text_of("docs/strategies.md")


def test_every_style_is_listed() -> None:
    page = text_of("docs/tensor_parallel.md")
    assert all(re.search(rf"^\| `{re.escape(style)}` \|", page, re.MULTILINE) for style in STYLES)


def test_the_table_of_low_precision_is_what_constructors_take() -> None:
    page = text_of(low_precision_table.PAGE)
    again = "write it: python -m tests.docs.low_precision_table"
    assert page == low_precision_table.with_table(page), again
