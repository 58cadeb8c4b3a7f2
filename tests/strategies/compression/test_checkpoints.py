"""What compression keeps between steps is in the checkpoint, whatever ranks and stages read it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.data_parallel.compression import Compressor, OneBit, PowerSGD, TopK
from tests.checkpoint.saved_sections import compression_in
from tests.strategies.parity import (
    ACCUMULATE,
    STRATEGIES,
    Curve,
    GlobalBatches,
    build,
    ignoring,
    quiet_trainer,
)

pytestmark = ignoring(
    # The resumed runs write no checkpoints of their own.
    "Be aware that when using `ckpt_path`"
)

NUM_STEPS = 4  # an epoch
KINDS: dict[str, Any] = {
    "topk": lambda: TopK(ratio=0.1, warmup_steps=2),
    "onebit": lambda: OneBit(warmup_steps=2),
    "powersgd": lambda: PowerSGD(rank=2),
    "powersgd16": lambda: PowerSGD(2, warmup_steps=2, factor_dtype="bfloat16", adam=True),
}
PLACES = [
    (("shard_ddp", 2), ("zero2", 3)),
    (("zero1", 3), ("shard_ddp", 2)),
    (("zero2", 2), ("zero1", 4)),
    (("zero2", 3), ("zero2", 2)),
]


@dataclass
class Watch(L.Callback):
    """How often gradients were averaged, and whether Adam's second moment was frozen then."""

    steps: list[int] = field(default_factory=list)
    frozen: list[bool] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        exchange = trainer.strategy.engine.exchanges[0]
        self.steps.append(exchange.step)
        self.frozen.append(exchange.froze_variance)


def fit(
    place: tuple[str, int],
    compression: Compressor | str | None,
    *callbacks: L.Callback,
    num_steps: int = NUM_STEPS,
    ckpt_path: Path | None = None,
    folder: Path | None = None,
) -> L.Trainer:
    """Train; with `folder` leave the first epoch's checkpoint there."""
    name, num_ranks = place
    model, writers = build("lstm"), []
    if folder is not None:
        writers = [ModelCheckpoint(folder, "first", every_n_train_steps=NUM_STEPS)]
    trainer = quiet_trainer(
        strategy=STRATEGIES[name](backend="in_process", compression=compression),
        devices=num_ranks,
        callbacks=[*callbacks, *writers],
        enable_checkpointing=folder is not None,
        max_steps=num_steps,
        accumulate_grad_batches=1,
    )
    trainer.fit(
        model, datamodule=GlobalBatches(model, NUM_STEPS // ACCUMULATE), ckpt_path=ckpt_path
    )
    return trainer


def save(trainer: L.Trainer, path: Path) -> dict[str, Any]:
    trainer.save_checkpoint(path)
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert got["compressor"] == expected["compressor"]
    assert got["step"] == expected["step"]
    assert got["freezes_variance"] == expected["freezes_variance"]
    for kind in expected.keys() - {"compressor", "freezes_variance", "layout", "step"}:
        assert got[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(got[kind][name], value)


ALL = [(kind, *places) for kind in KINDS for places in PLACES]
QUICK = [(kind, *places) for kind, places in zip(KINDS, PLACES, strict=True)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("kind", "before", "after"), QUICK)
def test_the_state_is_taken_up_elsewhere(
    kind: str, before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    check_elsewhere(kind, before, after, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), [one for one in ALL if one not in QUICK])
def test_the_state_is_taken_up_everywhere(
    kind: str, before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    check_elsewhere(kind, before, after, tmp_path)


def check_elsewhere(
    kind: str, before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    first = save(fit(before, KINDS[kind]()), tmp_path / "first.ckpt")[CHECKPOINT_KEY]
    state = compression_in(first)
    shapes = {name: tuple(value.shape) for name, value in build("lstm").named_parameters()}
    residual = {name: tuple(value.shape) for name, value in state["residual"].items()}
    assert residual.items() <= shapes.items()
    assert any(value.abs().sum() > 0 for value in state["residual"].values())
    assert set(state["step"].values()) == {NUM_STEPS}
    resumed = fit(after, KINDS[kind](), ckpt_path=tmp_path / "first.ckpt")  # no step is left
    again = compression_in(save(resumed, tmp_path / "again.ckpt")[CHECKPOINT_KEY])
    assert_same_state(again, state)
    onwards = fit(after, KINDS[kind](), num_steps=8, ckpt_path=tmp_path / "first.ckpt")
    assert onwards.global_step == 8


RESUMED: list[tuple[tuple[str, int], Compressor | str]] = [
    (("shard_ddp", 2), "int8"),
    (("zero2", 3), "int8"),
    (("zero1", 1), PowerSGD(rank=2, warmup_steps=2, adam=True)),  # of several, residuals are mixed
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("place", "compression"), RESUMED)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    place: tuple[str, int], compression: Compressor | str, tmp_path: Path
) -> None:
    """Random rounding, too, goes on where it was, and so does a frozen second moment."""
    full, rest = Curve(), Curve()
    fit(place, compression, full, num_steps=8)
    fit(place, compression, folder=tmp_path)
    fit(place, compression, rest, num_steps=8, ckpt_path=tmp_path / "first.ckpt")
    assert rest.losses == pytest.approx(full.losses[NUM_STEPS:], rel=1e-6)


def test_a_resumed_warm_up_is_not_begun_anew(tmp_path: Path) -> None:
    fit(("zero1", 2), OneBit(warmup_steps=6), folder=tmp_path)
    watch = Watch()
    path = tmp_path / "first.ckpt"
    fit(("shard_ddp", 3), OneBit(warmup_steps=6), watch, num_steps=8, ckpt_path=path)
    assert watch.steps == [5, 6, 7, 8]
    assert watch.frozen == [False, False, True, True]


def test_without_compression_the_state_is_passed_over(tmp_path: Path) -> None:
    save(fit(("zero1", 2), TopK()), tmp_path / "first.ckpt")
    trainer = fit(("zero2", 2), None, num_steps=6, ckpt_path=tmp_path / "first.ckpt")
    assert "compression" not in save(trainer, tmp_path / "dense.ckpt")[CHECKPOINT_KEY]
    model = build("lstm")
    plain = quiet_trainer(max_steps=6, accumulate_grad_batches=1)
    plain.fit(
        model,
        datamodule=GlobalBatches(model, NUM_STEPS // ACCUMULATE),
        ckpt_path=tmp_path / "first.ckpt",
    )
    assert plain.global_step == 6


def test_a_dense_checkpoint_starts_without_residuals(tmp_path: Path) -> None:
    fit(("zero1", 2), None, folder=tmp_path)
    watch = Watch()
    fit(("zero1", 2), "topk", watch, num_steps=6, ckpt_path=tmp_path / "first.ckpt")
    assert watch.steps == [1, 2]


def test_another_compressor_takes_the_residual_alone(tmp_path: Path) -> None:
    first = save(fit(("zero1", 2), TopK(ratio=0.1)), tmp_path / "first.ckpt")[CHECKPOINT_KEY]
    resumed = fit(("zero1", 2), OneBit(warmup_steps=2), ckpt_path=tmp_path / "first.ckpt")
    state = compression_in(save(resumed, tmp_path / "again.ckpt")[CHECKPOINT_KEY])
    assert set(state["step"].values()) == {0}
    for name, value in compression_in(first)["residual"].items():
        torch.testing.assert_close(state["residual"][name], value)
    assert not any(value.any() for value in state["momentum"].values())


def test_a_second_moment_that_learned_from_what_was_compressed_has_a_warm_up(
    tmp_path: Path,
) -> None:
    """The same compressor froze nothing before; it has its warm-up now, and keeps the residual."""
    first = save(fit(("zero1", 2), PowerSGD()), tmp_path / "first.ckpt")[CHECKPOINT_KEY]
    watch, freezing = Watch(), PowerSGD(warmup_steps=2, adam=True)
    path = tmp_path / "first.ckpt"
    again = save(fit(("zero1", 2), freezing, ckpt_path=path), tmp_path / "again.ckpt")
    state = compression_in(again[CHECKPOINT_KEY])
    for name, value in compression_in(first)["residual"].items():
        torch.testing.assert_close(state["residual"][name], value)
    fit(("zero1", 2), freezing, watch, num_steps=8, ckpt_path=path)
    assert watch.steps == [1, 2, 3, 4]
    assert watch.frozen == [False, False, True, True]


def test_weights_alone_carry_no_state(tmp_path: Path) -> None:
    trainer = fit(("zero1", 2), TopK())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
