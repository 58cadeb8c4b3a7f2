"""`configure_optimizers` may return None: steps run, and nothing is trained."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from tests.checkpoint.test_misfits import (
    STRATEGIES,
    Counted,
    SavesAt,
    assert_same,
    fresh,
    trainer_of,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring(
    ".*microbatches are fewer than the",
    "You.re resuming from a checkpoint that ended before",
    ".*no gradient clipping will occur",
    ".*configure_optimizers` returned `None`",
)


class WithoutOptimizer(Counted):
    """Trains nothing."""

    def configure_optimizers(self) -> Any:
        return None


class Steps(L.Callback):
    """Counts batches."""

    num_batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_fit_saves_and_resumes(strategy: str, tmp_path: Path) -> None:
    model, before = fresh(WithoutOptimizer)
    for ckpt_path, until in ((None, 2), (tmp_path / "1.ckpt", 3)):
        trainer = trainer_of(
            "auto" if strategy == "auto" else STRATEGIES[strategy](),
            max_steps=until,
            gradient_clip_val=0.1,
            callbacks=[steps := Steps(), SavesAt(until - 1, tmp_path / f"{until - 1}.ckpt")],
        )
        trainer.fit(model, ckpt_path=ckpt_path)
        assert (trainer.global_step, steps.num_batches) == (until, 2)
        assert_same(model.state_dict(), before)
    checkpoint = torch.load(tmp_path / "2.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"] == [{}]
    assert_same(checkpoint["state_dict"], before)
