"""The tables of the page on migrating have every argument of the strategy that is left."""

import inspect

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import lightning_shard
from lightning_shard.core.schemes import SCHEMES
from tests.docs.pages import quotes, tables

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


def listed(kind: type) -> set[str]:
    return {name for row in TABLES[kind.__name__].rows for name in quotes(row[0])}


def arguments(kind: type) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}


@pytest.mark.parametrize(
    "kind", [DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy]
)
def test_every_argument_has_a_row(kind: type) -> None:
    assert listed(kind) == arguments(kind)


@pytest.mark.parametrize("kind", [DistributedDataParallel, FullyShardedDataParallel])
def test_keywords_of_torchs_modules_are_theirs(kind: type) -> None:
    assert listed(kind) <= arguments(kind)


def test_what_takes_their_place_is_there() -> None:
    told = {row[1].strip("`") for table in TABLES.values() for row in table.rows}
    plain = {name for name in told if name.isidentifier()} - set(SCHEMES)
    assert plain <= OURS
    assert {"backend", "timeout", "bucket_mb"} <= plain
