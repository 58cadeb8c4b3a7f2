"""What offload and prefetch may be, what they are called, and what is told."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.names import strategy_name
from tests.strategies.offload.places import WARNINGS, offloaded
from tests.strategies.parity import GlobalBatches, build, ignoring, quiet_trainer

pytestmark = ignoring()


@pytest.mark.parametrize("suffix", ["", "_in_process", "_gloo", "_nccl", "_mpi"])
def test_names(suffix: str) -> None:
    two, three = (StrategyRegistry.get(f"{name}_offload{suffix}") for name in ("zero2", "zero3"))
    assert isinstance(two, ZeRO2Strategy)
    assert isinstance(three, ZeRO3Strategy)
    assert (two.offload, three.offload) == ("optimizer", "parameters")
    assert (strategy_name(two), strategy_name(three)) == ("zero2_offload", "zero3_offload")
    assert strategy_name(ZeRO1Strategy(offload="optimizer")) == "zero1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPStrategy(offload="optimizer"), "got ZeRO stage 0.*zero2_offload"),
        (lambda: ZeRO1Strategy(offload="parameters"), "got ZeRO stage 1.*zero3_offload"),
        (lambda: ZeRO2Strategy(offload="parameters"), "offload='optimizer', or strategy='zero3"),
        (lambda: ZeRO2Strategy(offload="optimizer", compression="int8"), "Int8.*Leave one"),
        (lambda: ZeRO2Strategy(offload="gradients"), "offload"),
        (lambda: ZeRO2Strategy(prefetch=1), "got ZeRO stage 2.*Leave it out"),
        (lambda: ZeRO3Strategy(prefetch=-1), "prefetch must be .* of at least 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "kind",
    [
        AsyncSGDStrategy,
        ElasticStrategy,
        HybridParallelStrategy,
        LocalSGDStrategy,
        PipelineParallelStrategy,
        TensorParallelStrategy,
    ],
)
def test_schemes_without_offload_say_so(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no option 'offload'"):
        kind(offload="optimizer")


@pytest.mark.filterwarnings(f"ignore:{WARNINGS[-1]}")
def test_optimizers_of_matrices_are_refused() -> None:
    class Model(type(build("gpt"))):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adafactor(self.parameters())

    model = Model()
    with pytest.raises(ConfigError, match=r"Adafactor.*full matrices.*leave offload out"):
        quiet_trainer(strategy=offloaded("zero2"), devices=2).fit(
            model, datamodule=GlobalBatches(model)
        )


def test_cpu_ranks_are_told_that_nothing_is_saved() -> None:
    model = build("gpt")
    trainer = quiet_trainer(strategy="zero2_offload_in_process", devices=2, max_steps=1)
    with pytest.warns(UserWarning, match="offload='optimizer' saves nothing on CPU ranks"):
        trainer.fit(model, datamodule=GlobalBatches(model))
