"""Host memory for snapshots, which is lent, given back and used again.

A fresh buffer costs its page faults, or a pinned one its registration. Sizes vary a little, with
the digits of counters, and for good when the number of ranks changes.
"""

import torch
from torch import Tensor

SPARE_BYTES = 64 << 10  # more than is asked for


class HostBuffers:
    """Lends buffers in this process's memory, pinned for copies from a CUDA device.

    What it does not do its subclass does, whose buffers outlive the process.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._idle: list[Tensor] = []

    def lend(self, num_bytes: int) -> Tensor:
        """Return a buffer of so many bytes: uint8, 1-D, in host memory."""
        buffer = take_fitting(self._idle, num_bytes)
        if buffer is None:
            while self._idle:  # of another number of ranks
                self.forget(self._idle.pop())
            buffer = self._make(num_bytes + SPARE_BYTES)
        return buffer[:num_bytes]

    def _make(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def keep(self, data: Tensor) -> None:
        """Note that a buffer now holds a complete snapshot, which counts until it is given back."""

    def give_back(self, data: Tensor) -> None:
        """Take back a buffer that is not needed any more, whichever code made it."""
        if not self._pinned or data.is_pinned():
            full = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
            self._idle.append(full)

    def forget(self, data: Tensor) -> None:
        """Note that a lent buffer does not come back, since something may still write to it."""


def take_fitting(idle: list[Tensor], num_bytes: int) -> Tensor | None:
    """Take the smallest buffer out of `idle` that is large enough and not far too large."""
    limit = 2 * (num_bytes + SPARE_BYTES)
    fitting = [place for place, one in enumerate(idle) if num_bytes <= one.numel() <= limit]
    if not fitting:
        return None
    return idle.pop(min(fitting, key=lambda place: idle[place].numel()))
