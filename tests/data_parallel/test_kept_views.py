"""Buffers that a part of a step needs keep their views, and nothing that user code still reads."""

from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_memory import FlatMemory
from lightning_shard.data_parallel.gradient_buffer import GradientBuffer
from lightning_shard.data_parallel.kept_views import KeptViews
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.testing import run_ranks


class Memory(FlatMemory):
    """Memory that can be set aside, as that of ranks on shared memory, or cannot."""

    def __init__(self, *, can: bool) -> None:
        self.aside: list[Callable[[], None]] = []
        self._can = can

    def set_aside(self, flat: Tensor, let_go: Callable[[], None]) -> bool:
        self.aside += [let_go] if self._can else []
        return self._can

    def take_up(self, flat: Tensor) -> None:
        self.aside.pop()


def shared() -> Tensor:
    return torch.frombuffer(bytearray(24), dtype=torch.float32)


def test_ordinary_memory_goes_and_its_views_stay() -> None:
    kept, flat = KeptViews(Memory(can=False)), torch.arange(6.0)
    views = list(flat.split(2))
    kept.keep(flat, views)
    assert flat.untyped_storage().nbytes() == 0
    assert kept.take() == (flat, views)
    flat.fill_(3.0)
    assert [view.tolist() for view in views] == [[3.0, 3.0]] * 3
    assert kept.take() is None


def test_shared_memory_is_set_aside_and_taken_up() -> None:
    memory, flat = Memory(can=True), shared()
    kept = KeptViews(memory)
    kept.keep(flat, [flat])
    assert len(memory.aside) == 1
    assert kept.take() == (flat, [flat])
    assert memory.aside == []


def test_who_needs_shared_memory_gets_it() -> None:
    memory, flat = Memory(can=True), shared()
    kept = KeptViews(memory)
    kept.keep(flat, [flat])
    memory.aside[0]()
    assert kept.take() is None


def test_memory_that_cannot_be_set_aside_goes_with_its_views() -> None:
    kept, flat = KeptViews(Memory(can=False)), shared()
    kept.keep(flat, [flat])
    assert kept.take() is None


def backward(engine: DataParallelEngine, model: nn.Module, factor: float) -> None:
    x = torch.full((2, 6), factor)
    with engine.step():
        loss = model(x).sum()
    with engine.backward():
        loss.backward()


def memories_of_averages(rank: int) -> tuple[list[int], int]:
    """Return which objects the averages of four backwards were, and the bytes held after them."""
    assert dist.group.WORLD is not None
    ranks: Collectives = get_backend("in_process").collectives(dist.group.WORLD)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=3, bucket_mb=1e-5))
    buffer: GradientBuffer = engine.gradients[0].buffer  # whose gradients come last
    made: list[int] = []
    for _ in range(4):
        backward(engine, model, 1.0)
        made.append(id(buffer.local_views[0]))
        model.zero_grad()
    buffer.give_up_zeroed()
    kept = buffer._spare_local._kept
    assert kept is not None
    return made, kept[0].untyped_storage().nbytes()


def test_views_of_averages_are_made_once_and_hold_no_memory_between() -> None:
    for made, num_bytes in run_ranks(memories_of_averages, 1):  # no peer reads them a little longer
        assert len(set(made)) == 1
        assert num_bytes == 0


def test_a_buffer_that_lets_go_of_all_keeps_no_views() -> None:
    with patch.object(KeptViews, "let_go", autospec=True) as let_go:
        run_ranks(dropped, 1)
    assert let_go.call_count == 2


def dropped(rank: int) -> None:
    assert dist.group.WORLD is not None
    ranks: Collectives = get_backend("in_process").collectives(dist.group.WORLD)
    engine = DataParallelEngine(nn.Linear(2, 2), ranks, EngineOptions(stage=2))
    buffer: GradientBuffer = engine.gradients[0].buffer
    buffer.drop()
