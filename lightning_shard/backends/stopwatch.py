"""How long something takes a rank while its peers do the same."""

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_shard.backends.collectives import Collectives


class Stopwatch:
    """Takes times on a device, from a moment at which all ranks of a group are there."""

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self._group, self._device = group, device

    def seconds(self, action: Callable[[], Any], *, rounds: int = 1, times: int = 1) -> float:
        """Return the least seconds of an action, of some rounds of so many; each rank must call."""
        self._group.barrier()
        self._finish()
        taken = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(times):
                action()
            self._finish()
            taken.append((time.perf_counter() - begin) / times)
        return min(taken)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
