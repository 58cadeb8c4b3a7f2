"""Which buffers follow rank 0, and when."""

import torch
from torch import nn

from lightning_shard.data_parallel.buffers import BufferSync
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks


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
        sync = BufferSync(model, all_ranks())
        getattr(sync, method)()
        model.nothing = torch.zeros(1)
        return values(model)

    return [result for result in run_ranks(fn, 3) if result is not None]


def test_all_follow_rank_zero_at_first() -> None:
    first = {"mean": 1.0, "narrow": 1.0, "count": 1.0, "mask": 1.0, "nothing": 0.0}
    assert run("broadcast_all") == [first] * 3


def test_later_statistics_and_what_has_been_seen_to_change() -> None:
    """Counters in whole numbers, or outside of the state dict, never followed, as masks."""

    def fn(rank: int) -> dict[str, float]:
        model = Buffers(rank + 1)
        sync = BufferSync(model, all_ranks())
        sync.broadcast_all()
        model.mask.data.fill_(rank)  # a constant: nothing sees it
        model.mean.fill_(rank)
        model.count = model.count + rank
        sync.note_training(exchanges=True)
        sync.follow(exchanged=False)
        model.nothing = torch.zeros(1)
        return values(model)

    assert run_ranks(fn, 3) == [
        {"mean": 0.0, "narrow": 1.0, "count": 1.0, "mask": r, "nothing": 0.0}
        for r in (0.0, 1.0, 2.0)
    ]


def test_rank_zero_says_whether_an_optimizer_has_stepped() -> None:
    def fn(rank: int) -> list[float]:
        model = Buffers(0)
        sync = BufferSync(model, all_ranks())
        seen = []
        for step_of in ({}, {1}, {0}, {0, 1}):
            sync.note_update(ends=rank in step_of)
            model.mean += rank
            sync.follow(exchanged=True)
            seen.append(model.mean.mean().item())
        return seen

    assert run_ranks(fn, 2) == [[0.0] * 4, [1.0, 2.0, 0.0, 0.0]]


def test_caches_of_other_sizes_on_other_ranks_stay_where_they_are() -> None:
    """A cache that grew on one rank was sent to others, of whose caches it had not the size."""

    def fn(rank: int) -> list[float]:
        model = Buffers(rank + 1)
        sync = BufferSync(model, all_ranks())
        sync.broadcast_all()
        model.register_buffer("mask", torch.full((2 + 3 * rank,), float(rank)), persistent=False)
        model.count.add_(rank)
        sync.broadcast_changing()
        return [model.get_buffer("mask").sum().item(), model.get_buffer("count").item()]

    assert run_ranks(fn, 2) == [[0.0, 1.0], [5.0, 1.0]]


def test_another_object_goes_on_with_what_one_has_learnt() -> None:
    """A step that was replayed began with no step before it, and its buffers followed nobody."""

    def fn(rank: int) -> list[float]:
        model = Buffers(rank + 1)
        group = all_ranks()
        sync, other = BufferSync(model, group), BufferSync(model, group)
        sync.note_training(exchanges=True)
        sync.note_update(ends=True)
        other.go_on(*sync.learnt())
        other.follow(exchanged=False)
        return list(values(model).values())[:4]

    assert run_ranks(fn, 2) == [[1.0] * 4] * 2
