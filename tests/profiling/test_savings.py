"""The table of held bytes: its text, when it is printed, and by whom."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_shard  # noqa: F401  the import registers the names of the strategies
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.errors import ConfigError
from lightning_shard.profiling import HeldBytesTable
from lightning_shard.profiling.savings import render_held_bytes
from lightning_shard.strategies.trainer.hook_advice import may_edit_gradients
from tests.examples.commands import ignoring_advice, largest_shares
from tests.trainers import cpu_trainer

pytestmark = ignoring_advice()


class Wide(BoringModel):
    """Large enough that padding does not show in the shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2 * 2048)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class TwoOptimizers(BoringModel):
    """Steps two optimizers by hand in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(32, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(layer.parameters()) for layer in (self.layer, self.other)]


def fit(model: pl.LightningModule, strategy: str, num_ranks: int, **options: int) -> None:
    trainer = cpu_trainer(
        strategy=strategy,
        devices=num_ranks,
        callbacks=[HeldBytesTable()],
        limit_val_batches=0,
        **options,
    )
    trainer.fit(model)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1_500_000, "1.43 MiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
def test_sizes_are_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_the_table_has_a_row_for_each_rank_and_the_worst_share() -> None:
    held = [
        HeldBytes(parameters=1024, gradients=512, optimizer_state=100),
        HeldBytes(parameters=1024, gradients=256, optimizer_state=200),
    ]
    replicated = HeldBytes(parameters=2048, gradients=2048, optimizer_state=0)
    lines = [line.strip("│┃├┤ ") for line in render_held_bytes(held, replicated).splitlines()]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert ["0", "1.00 KiB", "512 B", "100 B", "1.60 KiB"] in cells
    assert ["1", "1.00 KiB", "256 B", "200 B", "1.45 KiB"] in cells
    assert ["replicated", "2.00 KiB", "2.00 KiB", "0 B", "4.00 KiB"] in cells
    assert ["most / replicated", "50.0%", "25.0%", "-", "39.9%"] in cells


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        ("shard_ddp", ["100.0%", "100.0%", "100.0%", "100.0%"]),
        ("zero1", ["100.0%", "100.0%", "50.0%", "75.0%"]),
        ("zero2", ["100.0%", "50.0%", "50.0%", "62.5%"]),
        ("zero3", ["50.0%", "50.0%", "50.0%", "50.0%"]),
    ],
)
def test_every_stage_holds_its_share(
    strategy: str, shares: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Wide(), f"{strategy}_in_process", 2, max_steps=3)
    assert largest_shares(capsys.readouterr().out) == shares


def test_two_optimizers_are_counted_once_both_have_stepped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(TwoOptimizers(), "shard_ddp_in_process", 1, max_steps=6)
    assert largest_shares(capsys.readouterr().out)[2] == "100.0%"


def test_a_run_of_one_step_says_why_there_is_no_table() -> None:
    with pytest.warns(UserWarning, match="HeldBytesTable printed nothing"):
        fit(BoringModel(), "zero1_in_process", 2, max_steps=1)


def test_another_strategy_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="SingleDeviceStrategy"):
        fit(BoringModel(), "auto", 1, max_steps=2)


def test_ranks_need_not_compare_gradients_for_it() -> None:
    class Editing(pl.Callback):
        def on_before_optimizer_step(self, *_: object) -> None:
            """May write to a gradient, for all that can be known."""

    assert not may_edit_gradients(Wide(), [HeldBytesTable()])
    assert may_edit_gradients(Wide(), [HeldBytesTable(), Editing()])
