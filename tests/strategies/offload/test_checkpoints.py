"""A run in host memory goes on without offload, and the other way round, from either format."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from tests.strategies.models import ExampleGPT
from tests.strategies.offload.places import PLACES, WARNINGS, offloaded
from tests.strategies.parity import SMALL_BUCKET_MB, STRATEGIES, GlobalBatches, build, quiet_trainer

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

STEPS = 4


def strategy_of(place: str, **options: Any) -> Any:
    if place == "one device":
        return "auto"
    if place.startswith("plain "):
        kind = STRATEGIES[place.removeprefix("plain ")]
        return kind(backend="in_process", bucket_mb=SMALL_BUCKET_MB, **options)
    return offloaded(place, **options)


def fit(
    place: str,
    precision: str,
    *,
    max_steps: int,
    save: Path | None = None,
    load: Path | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    model = build("gpt")
    trainer = quiet_trainer(
        strategy=strategy_of(place, **options),
        devices=1 if place == "one device" else 2,
        max_steps=max_steps,
        precision=precision,
        accumulate_grad_batches=1,
        callbacks=[Saver(save)] if save is not None else None,
    )
    trainer.fit(model, datamodule=GlobalBatches(model, STEPS // 4), ckpt_path=load)
    return {name: value.clone() for name, value in model.state_dict().items()}


class Saver(L.Callback):
    """Saves once, after half of the steps: the first of two epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.few_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("checkpoint_format", "after"),
    [
        ("full", "one device"),  # plain Lightning reads no folders
        *(
            (one, place)
            for one in ("full", "sharded")
            for place in ("plain zero1", "plain zero3", *PLACES)
        ),
    ],
)
@pytest.mark.parametrize("before", PLACES)
def test_runs_go_on_elsewhere(
    before: str, after: str, checkpoint_format: str, tmp_path: Path
) -> None:
    path = tmp_path / "half.ckpt"
    whole = fit(before, "32-true", max_steps=STEPS, save=path, checkpoint_format=checkpoint_format)
    gone_on = fit(after, "32-true", max_steps=STEPS, load=path)
    for name, value in whole.items():
        torch.testing.assert_close(gone_on[name], value, rtol=1e-5, atol=2e-7)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@pytest.mark.parametrize("place", PLACES)
def test_the_masters_digits_are_saved(place: str, checkpoint_format: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    whole = fit(
        place, "bf16-mixed", max_steps=STEPS, save=path, checkpoint_format=checkpoint_format
    )
    gone_on = fit(place, "bf16-mixed", max_steps=STEPS, load=path)
    for name, value in whole.items():
        assert torch.equal(gone_on[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("before", ["plain zero2", "plain zero3", "one device"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_without_offload_goes_on_in_host_memory(
    before: str, place: str, tmp_path: Path
) -> None:
    path = tmp_path / "half.ckpt"
    whole = fit(before, "32-true", max_steps=STEPS, save=path)
    gone_on = fit(place, "32-true", max_steps=STEPS, load=path)
    for name, value in whole.items():
        torch.testing.assert_close(gone_on[name], value, rtol=1e-5, atol=2e-7)


def test_the_groups_of_the_optimizer_keep_the_users_options() -> None:
    model = ExampleGPT()
    trainer = quiet_trainer(strategy=offloaded("zero2"), devices=2, max_steps=1)
    trainer.fit(model, datamodule=GlobalBatches(model, 1))
    assert [group["fused"] for group in trainer.optimizers[0].param_groups] == [None, None]
