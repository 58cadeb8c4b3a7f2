"""Units, buckets and the format of gradients, where ranks split a model: as under ZeRO."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from tests.strategies.parity import SMALL_BUCKET_MB, GlobalBatches, build, ignoring, quiet_trainer

pytestmark = ignoring()

SCHEMES: dict[str, Any] = {
    "tensor": lambda **options: TensorParallelStrategy(
        tensor_parallel_size=2, zero_stage=3, **options
    ),
    "pipeline": lambda **options: PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=3, **options
    ),
    "hybrid": lambda **options: HybridParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=3, zero_stage=2, **options
    ),
}


@dataclass
class Seen(L.Callback):
    """What rank 0 has of a fit, on four ranks of which two share data."""

    losses: list[float]
    num_units: int = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_units = len(trainer.strategy.engine.flats)


@cache
def seen(scheme: str, **options: Any) -> Seen:
    units = {"units": list(options.pop("units"))} if "units" in options else {}
    callback, model = Seen([]), build("gpt")
    quiet_trainer(
        strategy=SCHEMES[scheme](backend="in_process", **options, **units),
        devices=4,
        max_steps=2,
        callbacks=[callback],
    ).fit(model, datamodule=GlobalBatches(model, num_steps=2))
    return callback


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_small_buckets_make_more_units_and_the_same_training(scheme: str) -> None:
    usual, small = seen(scheme), seen(scheme, bucket_mb=SMALL_BUCKET_MB)
    assert small.num_units > usual.num_units
    assert small.losses == pytest.approx(usual.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_units_are_named_by_the_classes_of_the_model_that_was_split(scheme: str) -> None:
    small = seen(scheme, bucket_mb=SMALL_BUCKET_MB)
    blocks = seen(scheme, bucket_mb=SMALL_BUCKET_MB, units=("Block",))
    layers = seen(scheme, bucket_mb=SMALL_BUCKET_MB, units=("Linear",))
    assert blocks.num_units == small.num_units < layers.num_units
    assert layers.losses == pytest.approx(small.losses, rel=1e-5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_travel_in_the_format_that_is_asked_for(scheme: str) -> None:
    usual, narrow = seen(scheme), seen(scheme, reduce_dtype="bfloat16")
    assert narrow.losses == pytest.approx(usual.losses, rel=1e-3)
    assert narrow.losses != usual.losses  # the last two are after an update
