"""Where shards, gradients and state lie, on CPU ranks and with ranks that share a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.offload.test_training import PLACES
from tests.data_parallel.test_training import SMALL_BUCKET_MB, Net
from tests.groups import engine_of

STEPS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def batches(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator).to(device) for _ in range(STEPS)]


def alone(device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in batches(device):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def check_places(engine: DataParallelEngine, optimizer: torch.optim.Optimizer) -> None:
    for flat in engine.flats:
        assert flat.host is not None
        assert flat.full.device == engine.device
        assert flat.host.tensor.device.type == "cpu"
        assert flat.host.tensor.is_pinned() is (engine.device.type == "cuda")
        assert flat.host.tensor.data_ptr() != flat.full.untyped_storage().data_ptr()
    for gradients in engine.gradients:
        assert [one.device.type for one in gradients.buffer.host_buffers()] == ["cpu"]
        if engine.options.stage > 1:
            assert gradients.buffers() == []
    for entries in optimizer.state.values():
        assert entries["exp_avg"].device.type == "cpu"


def on_ranks(rank: int, device: str, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = engine_of(model, bucket_mb=SMALL_BUCKET_MB, **options)
    sharded = ShardedOptimizer(optimizer, engine)
    for batch in batches(device):
        optimizer.zero_grad()
        with engine.step():
            loss = model(batch[rank::2]).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        check_places(engine, optimizer)
    engine.detach(restore=True)
    sharded.detach()
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("device", DEVICES)
def test_state_lies_on_the_host_and_training_is_one_devices(device: str, place: str) -> None:
    expected = alone(device)
    for found in run_ranks(lambda rank: on_ranks(rank, device, PLACES[place]), 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
