"""Every option of every strategy, compressor, mesh and callback is refused by name if need be.

What is wrong for an option follows from its declaration: values of each type that it does not
have. What is out of its range is in `OUT_OF_RANGE`, which has each option with a limit.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import lightning_shard
from lightning_shard import AsyncSGDStrategy, ParallelMesh, profiling
from lightning_shard.core.options import checked_options
from lightning_shard.data_parallel.compression import COMPRESSORS, Int8, TopK
from lightning_shard.errors import ConfigError
from lightning_shard.fabric import strategy as of_fabric
from lightning_shard.ray import RayReportCallback
from lightning_shard.replay.record_steps import RecordSteps

PUBLIC = [getattr(lightning_shard, name) for name in lightning_shard.__all__]
PUBLIC += [getattr(profiling, name) for name in profiling.__all__]
PUBLIC += [*COMPRESSORS.values(), RayReportCallback, RecordSteps, of_fabric.FabricStrategy]
PUBLIC += [getattr(of_fabric, f"{name}Strategy") for name in ("DDP", "ZeRO1", "ZeRO2", "ZeRO3")]
OWNERS: list[Any] = [
    one
    for one in dict.fromkeys(PUBLIC)
    if isinstance(one, type)
    and not issubclass(one, Exception)
    and one.__init__ is not object.__init__
    and one is not of_fabric.FabricStrategy
]
OF_EACH_TYPE: dict[Any, list[Any]] = {
    NoneType: [None],
    bool: [True, np.True_],
    int: [1],
    float: [2.5],
    str: ["no such thing"],
    Path: [Path("x")],
    list: [[1], ["Block"], ["pp", 1]],
    dict: [{"a": 1}],
    timedelta: [timedelta(seconds=1)],
    Callable: [lambda value: 1],
}
OF_NO_TYPE: list[Any] = [object(), b"x", 1j, {1}, math.nan, math.inf, -math.inf, [object()]]
NEEDED: dict[Any, dict[str, Any]] = {
    RecordSteps: {"folder": "x"},
    profiling.Report: {"run_folder": "x"},
}
BELOW_ONE, BELOW_ZERO, NO_STAGE = [0, -1], [-1], [-1, 4]
OUT_OF_RANGE: dict[str, list[Any]] = {
    "backend": ["other", ""],
    "num_ranks": BELOW_ONE,
    "num_micro_batches": BELOW_ONE,
    "timeout": [0, -1.0, timedelta(0), 1e30],
    "units": [[]],
    "bucket_mb": [0, -1.0],
    "activation_checkpointing": [[], "none"],
    "compression": ["gzip"],
    "prefetch": BELOW_ZERO,
    "reshard_after_forward": [1, *BELOW_ONE],
    "plan": [{}],
    "tensor_parallel_size": BELOW_ONE,
    "pipeline_parallel_size": BELOW_ONE,
    "context_parallel_size": BELOW_ONE,
    "expert_parallel_size": BELOW_ONE,
    "data_parallel_size": [0, -2, (1, True), (1.5, 2), (1, 2, 3), [0, 1], (-1, -1)],
    "zero_stage": NO_STAGE,
    "schedule": ["2f2b"],
    "num_microbatches": BELOW_ONE,
    "split": ["halves", [1.5], ["a"], [True]],
    "device_memory": BELOW_ONE,
    "sync_every": BELOW_ONE,
    "warmup_steps": BELOW_ZERO,
    "outer_optimizer": ["adam", {"a": 1}],
    "fragments": BELOW_ONE,
    "overlap_steps": BELOW_ZERO,
    "mixing": [1, 1.5, -0.1],
    "staleness_bound": BELOW_ZERO,
    "scheme": ["tensor_parallel"],
    "min_ranks": BELOW_ONE,
    "max_ranks": BELOW_ONE,
    "snapshot_every": BELOW_ONE,
    "global_batch_size": BELOW_ONE,
    "max_failures": BELOW_ZERO,
    "patience": [-1.0],
    "block": [0, -1],
    "ratio": [0, 1.5, -0.1],
    "momentum": [1, -0.1],
    "rank": BELOW_ONE,
    "update_limit": [0, -1.0],
    "pp": BELOW_ONE,
    "dp": BELOW_ONE,
    "ep": BELOW_ONE,
    "cp": BELOW_ONE,
    "tp": BELOW_ONE,
    "shard": BELOW_ONE,
    "others": [{"rows": 0}, {"tp": 2}],
    "every_n_steps": BELOW_ONE,
    "every_n_epochs": BELOW_ZERO,
    "every_n_train_steps": BELOW_ZERO,
    "steps": [[-1]],
    "axis_order": [["pp"], ["pp", "dp", "dp"]],
}
ALSO_MINUS_ONE = "HybridParallelStrategy"  # takes -1 for one size


def declared(owner: Any) -> dict[str, Any]:
    """Return the type of each option of a class, with its limits."""
    group = getattr(owner.__init__, "group", owner)
    is_own = group is owner and group is not ParallelMesh
    hints = get_type_hints(owner.__init__ if is_own else group, include_extras=True)
    return {name: hints[name] for name in list(inspect.signature(owner).parameters)}


def leaves(hint: Any) -> Iterator[Any]:
    """Yield the types that a type is made of; a list's are within it."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        yield from leaves(parts[0])
    elif origin is Literal:
        yield str
    elif origin in (Union, UnionType):
        for part in parts:
            yield from leaves(part)
    else:
        yield {get_origin(Callable[[], int]): Callable, tuple: list, Sequence: list}.get(
            origin, origin
        )


def wrong_for(hint: Any) -> list[Any]:
    """Return values of all types that an option does not have."""
    kinds = set(leaves(hint))
    kinds |= {int} if float in kinds else set()
    of_others = [one for kind, ones in OF_EACH_TYPE.items() if kind not in kinds for one in ones]
    return of_others + OF_NO_TYPE


OPTIONS = [(owner, name, hint) for owner in OWNERS for name, hint in declared(owner).items()]


@pytest.mark.parametrize(
    ("owner", "option", "hint"),
    OPTIONS,
    ids=[f"{one.__module__.split('.')[1]}-{one.__name__}-{name}" for one, name, _ in OPTIONS],
)
def test_what_an_option_cannot_be_is_refused_by_its_name(
    owner: Any, option: str, hint: Any
) -> None:
    """Some were left to the Trainer, whose error named neither the option nor what was expected."""
    out = OUT_OF_RANGE.get(option, [])
    assert out or "Limit(" not in str(hint), "a limit without values out of range"
    if owner.__name__ == ALSO_MINUS_ONE:
        out = [one for one in out if one != -1]
    for value in [*wrong_for(hint), *out]:
        with pytest.raises(ConfigError) as refused:
            owner(**{**NEEDED.get(owner, {}), option: value})
        said = str(refused.value)
        assert said.startswith(f"{owner.__name__}: "), value
        assert option in said or repr(value) in said, value


def test_an_option_of_a_word_takes_its_words_only() -> None:
    for owner, option, hint in OPTIONS:
        if str in leaves(hint) and "Literal" in str(hint) and "str" not in str(hint):
            with pytest.raises(ConfigError, match=f"^{owner.__name__}: {option} must be .*'other'"):
                owner(**{**NEEDED.get(owner, {}), option: "other"})


def test_sizes_of_a_world_are_whole_numbers() -> None:
    for size in (True, 2.5, "2"):
        with pytest.raises(ConfigError, match="ParallelMesh: pp must be a whole number"):
            ParallelMesh.of_world(4, pp=size)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    strategy = AsyncSGDStrategy(staleness_bound=np.int64(2), bucket_mb=np.float32(0.5))
    assert type(strategy.updates.bound) is int
    assert TopK(ratio=Fraction(1, 4)).ratio == 0.25  # type: ignore[arg-type]
    assert type(Int8(block=np.int32(8)).block) is int
    assert type(ParallelMesh(pp=np.int64(2)).pp) is int


def test_what_is_said_names_owner_option_value_and_what_is_usual() -> None:
    with pytest.raises(ConfigError) as refused:
        TopK(ratio="1%")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "TopK: ratio must be a finite number above 0 and at most 1, such as 0.01, got '1%' of type "
        "str."
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
