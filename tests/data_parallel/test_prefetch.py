"""How many units stage 3 has unsharded at once, by how many it gathers ahead."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.units.unit import Unit
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

NUM_BLOCKS = 6


class Watch:
    """Counts the blocks' units that have memory for full parameters, at each unshard."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = [unit for unit in units if not unit.is_root]
        self.most = 0
        for unit in self._units:
            unit.on_unshard = self._before(unit, unit.on_unshard)

    def _before(self, unit: Unit, noted: Any) -> Any:
        def begun() -> None:
            noted()
            others = [one for one in self._units if one is not unit]
            full = sum(any(flat.is_unsharded for flat in one.flats) for one in others)
            self.most = max(self.most, full + 1)

        return begun

    def take(self) -> int:
        most, self.most = self.most, 0
        return most


def most_at_once(rank: int, prefetch: int | None) -> list[tuple[int, int]]:
    """Return for each step the most in its forward and in its backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_BLOCKS)))
    options = EngineOptions(stage=3, units=["Linear"], bucket_mb=1e-6, prefetch=prefetch)
    ranks = all_ranks()
    engine = DataParallelEngine(model, ranks, options)
    watch, found = Watch(engine.units), []
    for _ in range(3):
        with engine.step():
            loss = model(torch.ones(2, 8, requires_grad=True)).square().mean()
        forward = watch.take()
        with engine.backward():
            loss.backward()
        found.append((forward, watch.take()))
        for param in model.parameters():
            param.grad = None
    return found


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("prefetch", "at_once"), [(0, 1), (1, 2), (None, 2), (2, 3), (9, 6)])
def test_units_full_at_once(prefetch: int | None, at_once: int) -> None:
    for steps in run_ranks(lambda rank: most_at_once(rank, prefetch), 2):
        assert steps[-1] == (at_once, at_once)
