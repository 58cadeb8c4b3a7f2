"""The tables of the page on migrating have every argument of the strategy that is left."""

import inspect

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

import lightning_shard
from tests.docs.pages import quotes, tables

LEFT = (DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)
TABLES = {
    table.head[0].split("`")[1]: table
    for table in tables("docs/migrating.md")
    if "`" in table.head[0]
}
OURS = {
    option
    for name in lightning_shard.__all__
    if name.endswith("Strategy")
    for option in inspect.signature(getattr(lightning_shard, name).__init__).parameters
}


@pytest.mark.parametrize("kind", LEFT)
def test_every_argument_has_a_row(kind: type) -> None:
    rows = TABLES[kind.__name__].rows
    listed = {
        name
        for row in rows
        if "keyword of torch" not in row[0] and "the same)" not in row[0]
        for name in quotes(row[0])
    }
    arguments = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
    assert listed == arguments


def test_what_takes_their_place_is_there() -> None:
    told = {row[1].strip("`") for table in TABLES.values() for row in table.rows}
    plain = {name for name in told if name.isidentifier()}
    assert plain <= OURS
    assert {"backend", "timeout", "bucket_mb"} <= plain
