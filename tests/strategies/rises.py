"""How much ranks hold while they are set up, above what they hold afterwards."""

import lightning as L  # noqa: N812
import pytest

from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.data_parallel.deferred_init.counting import AliveBytes


def watched_starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect from now on the bytes that each rank holds when set up, and the most above them.

    Gradient buffers, which are made then, count as held, and are not in the first number.
    """
    found: list[tuple[int, int]] = []
    set_up = DataParallelStrategy.setup

    def counted(self: DataParallelStrategy, trainer: L.Trainer) -> None:
        with AliveBytes() as alive:
            set_up(self, trainer)
        held = self.held_bytes()
        found.append((held.parameters, alive.peak - held.parameters - held.gradients))

    monkeypatch.setattr(DataParallelStrategy, "setup", counted)
    return found
