"""Under stage 3 and a mixed format code of a step sees fp32 also between blocks of one unit."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy, ZeRO3Strategy
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring(
    ".*microbatches are fewer than the", "A step uses .* parameters outside of their stage"
)
WIDTH, FINE = 8, 2.0**-9  # which bfloat16 drops beside 2


class Reading(L.LightningModule):
    """Reads its blocks' weights before, between and after them; they lie in one unit."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.head, self.use, self.seen = nn.Linear(WIDTH, 1), use, list[Any]()
        with torch.no_grad():
            for block in self.blocks:
                block[0].weight.fill_(2.0)
                block[0].weight[0, 0] += FINE

    def look(self) -> None:
        self.seen += [self.use(block[0].weight) for block in self.blocks]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.look()
        for block in self.blocks:
            batch = block(batch) / WIDTH
            self.look()
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(model: Reading, strategy: Any, devices: int, precision: Any = "bf16-mixed") -> None:
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        precision=precision,
        max_steps=2,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    )
    trainer.fit(model, DataLoader(torch.randn(16, WIDTH), batch_size=4))  # type: ignore[arg-type]


def excess(weight: Tensor) -> float:
    with torch.no_grad():
        return float((weight - 2).sum())


USES: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "format": (lambda weight: weight.dtype, torch.float32),
    "values": (excess, FINE),
    "recorded": (lambda weight: float((weight - 2).sum().detach()), FINE),
    "shape": (lambda weight: (*weight.shape, weight.dtype), (WIDTH, WIDTH, torch.float32)),
}
RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}


@pytest.mark.parametrize("use", USES)
def test_weights_between_blocks_of_one_unit_are_not_rounded(use: str) -> None:
    """A block that had run stayed here in 16 bits until the last one of its unit had."""
    function, expected = USES[use]
    model = Reading(function)
    fit(model, ZeRO3Strategy(**RANKS), 2)
    assert set(model.seen) == {expected}


def add_up(weight: Tensor) -> float:
    with torch.no_grad():
        weight += FINE
    return float(weight.detach().float().mean())


def test_what_a_step_adds_between_blocks_is_not_rounded_away() -> None:
    """What a step adds between blocks was rounded away."""
    model, alone = Reading(add_up), Reading(add_up)
    fit(model, ZeRO3Strategy(**RANKS), 2)
    fit(alone, "auto", 1)
    torch.testing.assert_close(model.seen, alone.seen[: len(model.seen)])
    expected = torch.full((WIDTH, WIDTH), 2.0 + 10 * FINE)
    expected[0, 0] += FINE
    torch.testing.assert_close(model.blocks[0][0].weight, expected)  # type: ignore[index]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_formats_in_steps_of_later_microbatches_are_those_of_the_weights(schedule: str) -> None:
    """Formats in steps of later microbatches were those of compute."""
    model = Reading(lambda weight: str(weight.dtype))
    strategy = HybridParallelStrategy(
        pipeline_parallel_size=2, schedule=schedule, num_microbatches=4, zero_stage=3, **RANKS
    )
    fit(model, strategy, 4)
    flat = [one for seen in model.seen for one in ([seen] if isinstance(seen, str) else seen)]
    assert set(flat) == {"torch.float32"}
