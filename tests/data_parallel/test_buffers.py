"""Which buffers follow rank 0, and when."""

import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.buffers import BufferSync
from lightning_shard.testing import run_ranks


class Buffers(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2, 3), float(value)))
        self.register_buffer("narrow", torch.full((2,), value, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("mask", torch.full((2,), float(value)), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))


def values(model: nn.Module) -> dict[str, float]:
    return {name: buffer.float().mean().item() for name, buffer in model.named_buffers()}


def run(method: str) -> list[dict[str, float]]:
    def fn(rank: int) -> dict[str, float]:
        model = Buffers(rank + 1)
        assert dist.group.WORLD is not None
        sync = BufferSync(model, get_backend("in_process").collectives(dist.group.WORLD))
        getattr(sync, method)()
        model.nothing = torch.zeros(1)
        return values(model)

    return [result for result in run_ranks(fn, 3) if result is not None]


def test_all_follow_rank_zero_at_first() -> None:
    first = {"mean": 1.0, "narrow": 1.0, "count": 1.0, "mask": 1.0, "nothing": 0.0}
    assert run("broadcast_all") == [first] * 3


def test_later_only_floating_point_ones_of_the_state_dict() -> None:
    assert run("broadcast_changing") == [
        {"mean": 1.0, "narrow": 1.0, "count": r, "mask": r, "nothing": 0.0} for r in (1.0, 2.0, 3.0)
    ]
