"""The tables of migrating have every argument of theirs, and what takes its place is there."""

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
)
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed import pipelining
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import parallel
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.cli.parsers import LIGHTNINGS, TEXTS
from lightning_shard.core.schemes import COMPRESSIONS
from lightning_shard.data_parallel import compression
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.schedules import SCHEDULES
from lightning_shard.replay import RecordSteps
from tests.docs.pages import quotes, tables

PAGE = "docs/migrating.md"
ALL = [
    table
    for table in tables(PAGE)
    if "`" in table.head[0] or table.head[0] == "plugins and methods"
]
TABLES = {quotes(table.head[0])[0]: table for table in ALL if "`" in table.head[0]}
WITH_REMARKS = [table for table in ALL if len(table.head) == 3]
NOTHING = {"nothing is needed", "there is none"}
STRATEGIES = [
    getattr(lightning_shard, name) for name in lightning_shard.__all__ if name.endswith("Strategy")
]
OPTIONS = {name for kind in STRATEGIES for name in inspect.signature(kind).parameters}
SCOPE: dict[str, Any] = {
    **{name: getattr(lightning_shard, name) for name in lightning_shard.__all__},
    **{name: getattr(compression, name) for name in compression.__all__},
    "Trainer": L.Trainer,
    "fit": L.Trainer.fit,
    "trainer": L.Trainer,
    "self": L.LightningModule,
    "ModelCheckpoint": ModelCheckpoint,
    "DataLoader": DataLoader,
    "RecordSteps": RecordSteps,
    "seed_everything": L.seed_everything,
    "block": nn.Module,
    "torch": torch,
    "strategy": lightning_shard.DDPStrategy,
    "configure_optimizers": L.LightningModule.configure_optimizers,
}
"""What the page's code may begin with."""
BESIDE = {"async_save": {"checkpoint_format": "sharded"}}
"""By option what it needs beside it."""
OF_LIGHTNING = {"interval", "32-true", "bf16-true", "bf16-mixed", "16-mixed"}
THEIRS = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "comm_hook"}
"""Values of theirs that stand beside ours."""
_NAME = re.compile(r"(?:--)?[\w-]+")


def listed(name: str) -> set[str]:
    return {quote for row in TABLES[name].rows for quote in quotes(row[0])}


def arguments(*functions: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that functions take, but for collecting ones."""
    shown = [each for one in functions for each in inspect.signature(one).parameters.values()]
    collecting = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {each.name for each in shown if each.kind not in collecting}


@pytest.mark.parametrize(
    "kind",
    [
        *(DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy),
        *(fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy, init_device_mesh),
        *(parallelize_module, context_parallel, StateDictOptions, nn.utils.clip_grad_norm_),
        *(pipelining.PipelineStage, pipelining.pipeline, pipelining.ScheduleInterleaved1F1B),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_argument_has_a_row(kind: Any) -> None:
    assert listed(kind.__name__) == arguments(kind)


def test_every_argument_of_several_functions_has_a_row() -> None:
    assert listed("save") == arguments(dcp.save, dcp.load, dcp.async_save)
    passed_on = arguments(checkpoint) - {"function", "use_reentrant"}
    assert listed("checkpoint_wrapper") == arguments(checkpoint_wrapper) | passed_on


def test_every_method_schedule_and_style_has_a_row() -> None:
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert listed("FSDPModule") == methods
    schedules = {name for name in pipelining.__all__ if name.startswith("Schedule")}
    assert listed("pipelining") == schedules
    styles = set(parallel.__all__) - {"ParallelStyle", "parallelize_module"}
    assert listed("tensor.parallel") == styles


@pytest.mark.parametrize("kind", [DistributedDataParallel, FullyShardedDataParallel])
def test_keywords_of_torchs_modules_are_theirs(kind: Any) -> None:
    assert listed(kind.__name__) <= arguments(kind)


@pytest.mark.parametrize("package", ["torchtitan", "Megatron"])
def test_every_name_of_a_package_stands_once(package: str) -> None:
    of_package = [table for table in ALL if f"of {package}" in table.head[0]]
    assert len(of_package) > 4
    for table in of_package:
        names = [quote for row in table.rows for quote in quotes(row[0])]
        assert len(names) == len(set(names))
        assert all(_NAME.fullmatch(name) for name in names)
        assert all(quotes(row[0]) or row[0] == "all of both" for row in table.rows)


@pytest.mark.parametrize("table", WITH_REMARKS, ids=lambda table: table.head[0])
def test_a_row_says_what_takes_its_place_or_that_there_is_none(table: Any) -> None:
    assert [row for row in table.rows if not (quotes(row[1]) or row[1] in NOTHING)] == []


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.head[0])
def test_what_takes_their_place_is_there(table: Any) -> None:
    of_ours = [quote for row in table.rows for quote in quotes(row[1])]
    assert [one for one in of_ours if one not in THEIRS and not is_there(one)] == []


def test_what_is_not_there_is_noticed() -> None:
    there = ("zero3", "shard_ddp_in_process", "bucket_mb", 'offload="parameters"', '"int8"')
    there += ("Trainer(precision=...)", "lightning-shard consolidate", "self.all_gather")
    absent = ("zero4", "bucket_gb", 'offload="everything"', '"int7"', "Trainer(precise=...)")
    absent += ("lightning-shard merge", "self.all_scatter", "PowerSGD(order=2)", "no_such(1)")
    assert [one for one in there if not is_there(one)] == []
    assert [one for one in absent if is_there(one)] == []


def is_there(quote: str) -> bool:
    """Whether a quote is an option, a strategy, a command, or code of which all names are known."""
    if quote.startswith("lightning-shard "):
        return quote.split()[1] in {**TEXTS, **LIGHTNINGS}
    if quote in OPTIONS or quote in StrategyRegistry:
        return True
    (statement,) = ast.parse(quote).body
    if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        return isinstance(target, ast.Name) and _is_taken(target.id, statement.value)
    return isinstance(statement, ast.Expr) and _is_known(statement.value)


def _is_taken(option: str, value: ast.expr) -> bool:
    """Whether some strategy takes an option, and a value of it that is written out."""
    having = [kind for kind in STRATEGIES if option in inspect.signature(kind).parameters]
    try:
        given = ast.literal_eval(value)
    except ValueError:
        return bool(having)
    return any(_takes(kind, {option: given, **BESIDE.get(option, {})}) for kind in having)


def _takes(kind: Any, options: dict[str, Any]) -> bool:
    try:
        kind(**options)
    except ConfigError:
        return False
    return True


def _is_known(code: ast.expr) -> bool:
    if isinstance(code, ast.Constant):
        return code.value in WORDS
    if not isinstance(code, ast.Call):
        return _found(code) is not None
    function = _found(code.func)
    if function is None:
        return False
    parameters = inspect.signature(function).parameters.values()
    collects = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters}
    return collects or all(each.arg in names for each in code.keywords)


def _found(code: ast.expr) -> Any:
    """Return what a dotted name is; None where it is nothing."""
    if isinstance(code, ast.Attribute):
        return getattr(_found(code.value), code.attr, None)
    return SCOPE.get(code.id) if isinstance(code, ast.Name) else None


def _literals(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    for one in typing.get_args(hint):
        yield from _literals(one)


WORDS = {
    word
    for kind in STRATEGIES
    for one in inspect.signature(kind).parameters.values()
    for word in _literals(one.annotation)
}
WORDS |= {*COMPRESSIONS, *SCHEDULES, *OF_LIGHTNING}
"""Strings that options take."""
