"""Options are declared in groups, and flat for who reads or makes a strategy."""

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any, Unpack, get_type_hints

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import ParallelStrategy

import lightning_shard
from lightning_shard import HybridParallelStrategy, TensorParallelStrategy, ZeRO3Strategy
from lightning_shard.errors import ConfigError
from lightning_shard.strategies import configs
from lightning_shard.strategies.configs import DataParallelConfig, RunConfig, ScheduleConfig
from lightning_shard.strategies.flat_options import OptionGroup, part, takes
from lightning_shard.strategies.options import PlanOptions, RunOptions

STRATEGIES: list[Any] = [
    getattr(lightning_shard, name) for name in lightning_shard.__all__ if name.endswith("Strategy")
]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_signature_shows_every_option_with_its_type_and_default(kind: Any) -> None:
    parameters = list(inspect.signature(kind).parameters.values())
    of_lightning = list(inspect.signature(ParallelStrategy).parameters)
    assert [one.name for one in parameters[:5]] == of_lightning
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters[:5])
    assert all(one.kind is one.KEYWORD_ONLY for one in parameters[5:])
    assert all(one.default is not one.empty for one in parameters)
    assert all(one.annotation is not one.empty for one in parameters)
    assert len(parameters) > 10


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_docstring_explains_every_option_once(kind: Any) -> None:
    (owner, *_) = [one for one in kind.__mro__ if "__init__" in vars(one)]
    explained = re.findall(r"^    (\w+): \S", owner.__doc__, re.MULTILINE)
    assert [one for one in explained if one != "ConfigError"] == list(
        inspect.signature(kind).parameters
    )


def test_types_of_groups_are_those_that_callers_see() -> None:
    hints: dict[str, set[Any]] = {}
    for kind in STRATEGIES:
        for name, parameter in inspect.signature(kind).parameters.items():
            hints.setdefault(name, set()).add(parameter.annotation)
    groups = [one for one in vars(configs).values() if isinstance(one, type)]
    for group in groups:
        if issubclass(group, OptionGroup):
            own = get_type_hints(group)
            assert all(own[field.name] in hints[field.name] for field in fields(group)), group


def test_groups_are_frozen_and_take_what_belongs_to_them() -> None:
    group = ScheduleConfig.of({"split": [1, 2], "units": ["Block"]})
    assert group == ScheduleConfig(split=[1, 2])
    with pytest.raises(FrozenInstanceError):
        group.split = "flops"  # type: ignore[misc]
    assert part(PlanOptions, {"plan": "auto", "backend": "gloo"}) == {"plan": "auto"}


def test_lightnings_arguments_may_be_positional() -> None:
    accelerator = CPUAccelerator()
    assert ZeRO3Strategy(accelerator, None, bucket_mb=1.0).accelerator is accelerator
    with pytest.raises(TypeError, match="positional"):
        ZeRO3Strategy(None, None, None, None, None, "gloo")  # type: ignore[call-arg, misc]


class OfUser(ZeRO3Strategy):
    """Takes one option of its own, and passes others on."""

    def __init__(self, extra: int = 1, **others: Any) -> None:
        super().__init__(None, **others)  # type: ignore[misc]
        self.extra = extra


def test_a_class_that_passes_options_on_has_its_parents_too() -> None:
    made = OfUser(extra=2, bucket_mb=3.0)
    assert (made.extra, made._options.bucket_mb) == (2, 3.0)
    with pytest.raises(ConfigError, match=r"has no option 'bucket_mbs'.* mean 'bucket_mb'"):
        OfUser(bucket_mbs=1)
    with pytest.raises(ConfigError, match="OfUser: bucket_mb must be a finite number or 'auto'"):
        OfUser(bucket_mb=[1])
    assert list(inspect.signature(OfUser).parameters) == ["extra", "others"]


def test_a_command_line_has_types_defaults_and_explanations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HybridParallelStrategy, "s")
    given = ["--s.backend=gloo", "--s.data_parallel_size=[1, 2]", "--s.axis_order=[dp, pp, tp]"]
    parsed = parser.parse_args([*given, "--s.bucket_mb=2"]).s
    assert (parsed.data_parallel_size, parsed.bucket_mb) == ((1, 2), 2)
    assert (parsed.zero_stage, parsed.schedule, parsed.units) == (1, "1f1b", None)
    strategy = HybridParallelStrategy(**parsed.as_dict())
    assert strategy._axis_order == ("dp", "pp", "tp")
    parser.print_help()
    said = " ".join(capsys.readouterr().out.split())
    assert "Ranks of one pipeline. (type: int, default: 1)" in said


def test_what_makes_no_sense_for_a_scheme_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="TensorParallelStrategy has no option 'compression'"):
        TensorParallelStrategy(compression="int8")  # type: ignore[call-arg]


def test_a_constructor_takes_what_its_groups_have() -> None:
    def constructor(self: object, **options: Unpack[RunOptions]) -> None: ...

    with pytest.raises(AssertionError, match="RunOptions"):
        takes(RunConfig, DataParallelConfig)(constructor)
