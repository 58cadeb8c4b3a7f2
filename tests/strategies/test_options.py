"""Options are declared in groups, and flat for who reads or makes a strategy."""

import inspect
import re
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import ParallelStrategy

import lightning_shard
from lightning_shard import HybridParallelStrategy, TensorParallelStrategy, ZeRO3Strategy
from lightning_shard.core.options import AtLeastOne, Options, names_of, takes
from lightning_shard.errors import ConfigError
from lightning_shard.fabric import strategy as of_fabric
from lightning_shard.strategies.dimensions.pipeline import ScheduleOptions
from lightning_shard.strategies.dimensions.tensor import PlanOptions
from lightning_shard.strategies.options import TensorParallelOptions

STRATEGIES: list[Any] = [
    getattr(lightning_shard, name) for name in lightning_shard.__all__ if name.endswith("Strategy")
]
OF_FABRIC: list[Any] = [
    getattr(of_fabric, name) for name in ("DDPStrategy", "ZeRO1Strategy", "ZeRO2Strategy")
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


@pytest.mark.parametrize("kind", [*STRATEGIES, *OF_FABRIC])
def test_an_option_is_a_field_that_says_what_it_means(kind: Any) -> None:
    (group, *_) = [one.__init__.group for one in kind.__mro__ if hasattr(one.__init__, "group")]
    assert names_of(group) == list(inspect.signature(kind).parameters)
    for one in fields(group):
        assert one.metadata["doc"], one.name


def test_groups_are_frozen_and_take_what_belongs_to_them() -> None:
    group = TensorParallelOptions(plan="auto", tensor_parallel_size=2)
    with pytest.raises(FrozenInstanceError):
        group.plan = None  # type: ignore[misc]
    assert group.part(PlanOptions) == {"plan": "auto"}
    assert group.part(ScheduleOptions) == {}


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
    assert (made.extra, made.run.options.bucket_mb) == (2, 3.0)
    with pytest.raises(ConfigError, match=r"has no option 'bucket_mbs'.* mean 'bucket_mb'"):
        OfUser(bucket_mbs=1)
    with pytest.raises(ConfigError, match="OfUser: bucket_mb must be a finite number of MB abo"):
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
    assert strategy.axis_order == ("dp", "pp", "tp")
    parser.print_help()
    said = " ".join(capsys.readouterr().out.split())
    assert "Ranks of one pipeline. (type: int, default: 1)" in said


def test_what_makes_no_sense_for_a_scheme_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="TensorParallelStrategy has no option 'compression'"):
        TensorParallelStrategy(compression="int8")  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class SizeOptions(Options):
    """One option.

    Attributes:
        size: How many there are,
            and a second line.
    """

    size: AtLeastOne = 2


class Sized:
    """Takes a group."""

    @takes(SizeOptions)
    def __init__(self, options: SizeOptions) -> None:
        self.options = options


def test_a_constructor_takes_a_group_of_options_by_their_names() -> None:
    assert Sized(size=3).options == SizeOptions(size=3)
    assert str(inspect.signature(Sized)) == "(*, size: int = 2)"
    (field,) = fields(SizeOptions)
    assert field.metadata["doc"] == "How many there are,\n        and a second line."
    with pytest.raises(ConfigError, match=r"^Sized: size must be .* of at least 1, such as 2"):
        Sized(size=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        Sized(sise=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (ZeRO3Strategy, (25,), "25 stands in the place of accelerator, .* or bucket_mb=25"),
        (of_fabric.ZeRO2Strategy, (25,), "25 stands in the place of accelerator, .* bucket_mb=25"),
        (TensorParallelStrategy, (2,), "such as tensor_parallel_size=2 or zero_stage=2"),
        (ZeRO3Strategy, ("gloo",), r"by name, such as backend='gloo'\.$"),
        (ZeRO3Strategy, (None, 2), "2 stands in the place of parallel_devices, which must be None"),
        (ZeRO3Strategy, (object(),), r"Options are given by name\.$"),
    ],
)
def test_a_value_in_the_place_of_lightnings_arguments_is_refused(
    kind: Any, given: tuple[Any, ...], said: str
) -> None:
    """An option without its name was taken for an accelerator, and failed in the Trainer."""
    with pytest.raises(ConfigError, match=f"^{kind.__name__}: .*{said}"):
        kind(*given)


@pytest.mark.parametrize("name", ["accelerator", "cluster_environment", "checkpoint_io"])
def test_what_is_lightnings_must_be_of_its_class(name: str) -> None:
    for kind in (ZeRO3Strategy, of_fabric.ZeRO2Strategy):
        with pytest.raises(ConfigError, match=f"^{kind.__name__}: {name} must be an? .*, got 'a'"):
            kind(**{name: "a"})
