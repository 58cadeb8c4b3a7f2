"""`debug=True` over real processes: the same bits, and an error where ranks part ways."""

import re

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ZeRO1Strategy, ZeRO3Strategy
from lightning_shard.backends.debug_wrapper import DebugExchange, DebugGroup
from lightning_shard.errors import ConfigError
from tests.backends.debug_wrapper.programs import outcome
from tests.processes import run_processes
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    Run,
    assert_bitwise_equal,
    build,
    ignore_upstream_warnings,
    quiet_trainer,
    train,
)


def train_each(names: list[str], debug: bool) -> list[Run]:
    ignore_upstream_warnings()
    runs = []
    for name in names:
        strategy = STRATEGIES[name](backend="gloo", bucket_mb=SMALL_BUCKET_MB, debug=debug)
        runs.append(train(build("gpt"), strategy=strategy, devices=2))
        assert isinstance(dist.group.WORLD, DebugGroup) is debug
        assert isinstance(strategy.collectives, DebugExchange) is debug
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["zero3"], pytest.param(["shard_ddp", "zero1", "zero2"], marks=pytest.mark.slow)]
)
def test_training_gives_the_same_bits(names: list[str]) -> None:
    plain, checked = (
        run_processes(train_each, 2, names=names, debug=debug)[0] for debug in (False, True)
    )
    for run, expected in zip(checked, plain, strict=True):
        assert_bitwise_equal(run, expected)


class Branches(L.LightningModule):
    """Three blocks of different sizes, of which each rank runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 256 * (size + 1)) for size in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        block = self.blocks[self.global_rank + 1]
        return block(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Collides(Branches):
    """Rank 0 reduces where rank 1 broadcasts."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), src=0)
        return super().training_step(batch, batch_idx)


def fit(zero3: bool) -> tuple[str, str]:
    ignore_upstream_warnings()
    strategy = (ZeRO3Strategy if zero3 else ZeRO1Strategy)(
        backend="gloo", bucket_mb=SMALL_BUCKET_MB, timeout=30, debug=True
    )
    model = Branches() if zero3 else Collides()
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=2)
    result = outcome(lambda: trainer.fit(model, DataLoader(torch.ones(8, 4), batch_size=2)))
    return result


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("zero3", [True, False])
def test_ranks_that_take_different_branches_are_all_told(zero3: bool) -> None:
    """Of blocks under ZeRO-3, of the user's own calls in a step."""
    for rank, (kind, text) in enumerate(run_processes(fit, 2, zero3=zero3)):
        assert kind == "CollectiveMismatchError", text
        assert f"This is rank {rank}, in " in text
        sites = re.findall(r"rank \d: (?:got|expected) (\w+)\(.*\) at (\S+):\d+", text)
        expected = ["all_gather", "all_gather"] if zero3 else ["broadcast", "all_reduce"]
        assert sites == [(operation, __file__) for operation in expected]


def test_switched_on_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SHARD_DEBUG", "1")
    assert ZeRO1Strategy(backend="gloo").backend.c10d_name == "checked_gloo"
    monkeypatch.setenv("LIGHTNING_SHARD_DEBUG", "0")
    assert ZeRO1Strategy(backend="gloo").backend.c10d_name == "gloo"
    assert ZeRO1Strategy(backend="gloo", debug=True).backend.debug
    monkeypatch.setenv("LIGHTNING_SHARD_DEBUG", "yes")
    with pytest.raises(ConfigError, match="LIGHTNING_SHARD_DEBUG is 'yes'; expected 1"):
        ZeRO1Strategy()
