"""Every option of every strategy, compressor, mesh and callback is refused by name if need be."""

import inspect
import math
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_shard
from lightning_shard import (
    AsyncSGDStrategy,
    AutoStrategy,
    ContextParallelStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    ParallelMesh,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
    profiling,
)
from lightning_shard.core.option_checks import checked_options
from lightning_shard.data_parallel.compression import COMPRESSORS, Int8, OneBit, PowerSGD, TopK
from lightning_shard.errors import ConfigError
from lightning_shard.profiling.held_bytes import MemoryMonitor
from lightning_shard.profiling.pipeline_timeline import PipelineTimeline
from lightning_shard.profiling.plan_monitor import PlanMonitor
from lightning_shard.profiling.progress_bar import CompressionRatio, ExpertBalance
from lightning_shard.profiling.step_monitor import StepMonitor
from lightning_shard.profiling.traffic_monitor import TrafficMonitor

NOT_WHOLE: list[Any] = [True, np.True_, 2.5, "1%", "2", math.nan, math.inf, [1], None, object()]
NOT_REAL: list[Any] = [True, "half", "1%", math.nan, math.inf, -math.inf, [0.5], None, 1j]
NOT_FLAG: list[Any] = [0, 1, "yes", None, 1.0]
NOT_TEXT: list[Any] = [1, True, 2.5, b"x", object()]
NOT_TEXTS: list[Any] = ["Block", [1], [True], 3, {"a": 1}]
BELOW_ONE, BELOW_ZERO = [0, -1], [-1]


def optional(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


EVERYWHERE: dict[str, list[Any]] = {
    "backend": [*NOT_TEXT, "other"],
    "num_ranks": [*optional(NOT_WHOLE), *BELOW_ONE],
    "timeout": [*NOT_REAL, 0, -1.0, timedelta(0), 1e30],
    "debug": NOT_FLAG,
    "announce": NOT_FLAG,
    "checkpoint_format": [*NOT_TEXT, "other"],
    "save_trainable_only": NOT_FLAG,
    "async_save": NOT_FLAG,
    "save_on_sigterm": NOT_FLAG,
}
UNITS: dict[str, list[Any]] = {
    "units": [*NOT_TEXTS, []],
    "bucket_mb": [*optional(NOT_REAL), 0, -1.0],
    "activation_checkpointing": [True, 1, "none", [], [1]],
    "activation_offload": NOT_FLAG,
}
REDUCED: dict[str, list[Any]] = {"reduce_dtype": [*NOT_TEXT, "float8"]}
SHARED = EVERYWHERE | UNITS | REDUCED
COMPRESSED: dict[str, list[Any]] = {"compression": [1, True, 2.5, "gzip", object(), {"a": 1}]}
OFFLOADED: dict[str, list[Any]] = {"offload": [*NOT_TEXT, "everything"]}
AHEAD: dict[str, list[Any]] = {"prefetch": [*optional(NOT_WHOLE), -1]}
ENDS: dict[str, list[Any]] = {"full_parameters_after_fit": ["yes", 0, 1, None, 1.5]}
DATA = SHARED | COMPRESSED
SIZE = optional(NOT_WHOLE)
PLAN: dict[str, list[Any]] = {"plan": [1, True, "all", {}, ["a"]]}
PIPELINE: dict[str, list[Any]] = {
    "pipeline_parallel_size": SIZE,
    "schedule": [*NOT_TEXT, "2f2b"],
    "num_microbatches": [*SIZE, *BELOW_ONE],
    "blocks": NOT_TEXT,
    "split": [1, True, 2.5, [1.5], ["a"], [True], "halves"],
    "batch_lists": [*NOT_TEXT, "list"],
}
TABLE: dict[Any, dict[str, list[Any]]] = {
    DDPStrategy: DATA | ENDS | OFFLOADED | AHEAD,
    ZeRO1Strategy: DATA | ENDS | OFFLOADED | AHEAD,
    ZeRO2Strategy: DATA | ENDS | OFFLOADED | AHEAD,
    ZeRO3Strategy: DATA | ENDS | OFFLOADED | AHEAD,
    TensorParallelStrategy: SHARED
    | ENDS
    | PLAN
    | {
        "tensor_parallel_size": SIZE,
        "zero_stage": [*NOT_WHOLE, 4, -1],
        "sequence_parallel": NOT_FLAG,
    },
    ContextParallelStrategy: SHARED
    | ENDS
    | {"context_parallel_size": SIZE, "zero_stage": [*NOT_WHOLE, 4, -1]},
    PipelineParallelStrategy: SHARED | ENDS | PIPELINE,
    HybridParallelStrategy: SHARED
    | ENDS
    | PLAN
    | PIPELINE
    | {
        "tensor_parallel_size": NOT_WHOLE,
        "context_parallel_size": NOT_WHOLE,
        "expert_parallel_size": NOT_WHOLE,
        "data_parallel_size": [True, 2.5, "2", (1, True), (1.5, 2), (1, 2, 3), [0, 1]],
        "zero_stage": [*NOT_WHOLE, 4, -1],
        "axis_order": [1, "ppdptp", ["pp", 1, "tp"], ["pp"], ["pp", "dp", "dp"]],
    },
    AutoStrategy: EVERYWHERE
    | ENDS
    | {
        "machine": NOT_TEXT,
        "device_memory": [*optional(NOT_WHOLE), *BELOW_ONE],
        "tensor_plan": [1, True, "auto", ["a"]],
        "choice_file": [1, True, ["a"]],
    },
    LocalSGDStrategy: DATA
    | {
        "sync_every": [*NOT_WHOLE, *BELOW_ONE],
        "warmup_steps": [*NOT_WHOLE, *BELOW_ZERO],
        "outer_optimizer": [1, True, "adam", {"a": 1}, {"class_path": "nothing.Here"}],
        "fragments": [*NOT_WHOLE, *BELOW_ONE, 11],
        "overlap_steps": [*NOT_WHOLE, *BELOW_ZERO, 10],
        "mixing": [*optional(NOT_REAL), 1, 1.5, -0.1],
    },
    AsyncSGDStrategy: EVERYWHERE
    | UNITS
    | {
        "staleness_bound": [*NOT_WHOLE, *BELOW_ZERO],
        "staleness_lr": [*NOT_TEXT, "half"],
        "warmup_steps": [*NOT_WHOLE, *BELOW_ZERO],
    },
    ElasticStrategy: SHARED
    | {
        "scheme": [*NOT_TEXT, "tensor_parallel"],
        "min_ranks": [*NOT_WHOLE, *BELOW_ONE],
        "max_ranks": [*optional(NOT_WHOLE), *BELOW_ONE],
        "snapshot_every": [*NOT_WHOLE, *BELOW_ONE],
        "global_batch_size": [*optional(NOT_WHOLE), *BELOW_ONE],
        "learning_rate_scaling": [*NOT_TEXT, "cubic"],
        "max_failures": [*NOT_WHOLE, *BELOW_ZERO],
        "patience": [*NOT_REAL, -1.0],
    },
    Int8: {
        "block": [*NOT_WHOLE, *BELOW_ONE],
        "rounding": [*NOT_TEXT, "up"],
        "seed": NOT_WHOLE,
    },
    TopK: {
        "ratio": [*NOT_REAL, 0, 1.5, -0.1],
        "momentum": [*NOT_REAL, 1, -0.1],
        "warmup_steps": [*NOT_WHOLE, *BELOW_ZERO],
        "adam": NOT_FLAG,
    },
    PowerSGD: {
        "rank": [*NOT_WHOLE, *BELOW_ONE],
        "warmup_steps": [*NOT_WHOLE, *BELOW_ZERO],
        "seed": NOT_WHOLE,
        "factor_dtype": [*NOT_TEXT, "float16"],
        "adam": NOT_FLAG,
    },
    OneBit: {
        "warmup_steps": [*NOT_WHOLE, *BELOW_ONE],
        "block": [*NOT_WHOLE, 1000, 2049],
        "adam": NOT_FLAG,
        "update_limit": [*optional(NOT_REAL), 0, -1.0],
    },
    ParallelMesh: {
        **{axis: [*NOT_WHOLE, *BELOW_ONE] for axis in ("pp", "dp", "ep", "cp", "tp")},
        "axis_order": [1, "ppdptp", ["pp", 1, "tp"], ["pp"]],
        "shard": [*optional(NOT_WHOLE), *BELOW_ONE],
    },
    CompressionRatio: {"name": NOT_TEXT},
    ExpertBalance: {"name": NOT_TEXT, "every_n_steps": [*NOT_WHOLE, *BELOW_ONE]},
    PipelineTimeline: {
        "folder": [1, True, 2.5],
        "every_n_steps": [*NOT_WHOLE, *BELOW_ONE],
        "formats": ["png", [1], ["gif"], 1],
    },
    StepMonitor: {"folder": [1, True, 2.5], "machine": [1, True, 2.5], "tokens": []},
    TrafficMonitor: {
        "folder": [1, True, 2.5],
        "every_n_steps": [*NOT_WHOLE, *BELOW_ONE],
        "dry_run": NOT_FLAG,
    },
    PlanMonitor: {"plan": [1, True, 2.5], "folder": [1, True, 2.5]},
    MemoryMonitor: {"folder": [1, True, 2.5], "every_n_steps": [*NOT_WHOLE, *BELOW_ONE]},
}
OF_LIGHTNING = {
    "self",
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
}
OPTIONS = [(owner, option) for owner, options in TABLE.items() for option in options]


def options_of(owner: Any) -> set[str]:
    return set(inspect.signature(owner.__init__).parameters) - OF_LIGHTNING


@pytest.mark.parametrize(
    ("owner", "option"), OPTIONS, ids=lambda one: getattr(one, "__name__", one)
)
def test_what_an_option_cannot_be_is_refused_by_its_name(owner: Any, option: str) -> None:
    for value in TABLE[owner][option]:
        with pytest.raises(ConfigError) as refused:
            owner(**{option: value})
        said = str(refused.value)
        assert option in said or str(value) in said, value


def test_the_table_has_every_option() -> None:
    public = [getattr(lightning_shard, name) for name in lightning_shard.__all__]
    public += [getattr(profiling, name) for name in profiling.__all__]
    owners = {one for one in public if isinstance(one, type) and not issubclass(one, Exception)}
    owners |= set(COMPRESSORS.values())  # type: ignore[arg-type]
    for owner in owners:
        if owner.__init__ is not object.__init__:
            assert options_of(owner) == TABLE.get(owner, {}).keys(), owner


def test_sizes_of_a_world_are_whole_numbers() -> None:
    for size in (True, 2.5, "2"):
        with pytest.raises(ConfigError, match="ParallelMesh: pp must be a whole number"):
            ParallelMesh.of_world(4, pp=size)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    strategy = AsyncSGDStrategy(staleness_bound=np.int64(2), bucket_mb=np.float32(0.5))
    assert type(strategy._bound) is int
    assert TopK(ratio=Fraction(1, 4)).ratio == 0.25  # type: ignore[arg-type]
    assert type(Int8(block=np.int32(8)).block) is int
    assert type(ParallelMesh(pp=np.int64(2)).pp) is int


def test_what_is_said_names_owner_option_value_and_what_is_usual() -> None:
    with pytest.raises(ConfigError) as refused:
        TopK(ratio="1%")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "TopK: ratio must be a finite number, such as 0.01, got '1%' of type str."
    )


def test_constructors_keep_what_they_say_of_themselves() -> None:
    parameters = inspect.signature(TopK.__init__).parameters
    assert list(parameters) == ["self", "ratio", "momentum", "warmup_steps", "adam"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'share'"):
        TopK(share=0.1)  # type: ignore[call-arg]


class Own:
    """Takes what is not checked, too."""

    @checked_options
    def __init__(self, size: int, folder: str | Path = "", anything: Any = None) -> None:
        self.size, self.folder, self.anything = size, folder, anything


def test_other_types_are_left_alone() -> None:
    own = Own(np.int8(3), Path("x"), anything=math.nan)
    assert (own.size, own.folder) == (3, Path("x"))
    assert math.isnan(own.anything)
