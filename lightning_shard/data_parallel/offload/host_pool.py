"""Host memory that is used again: pinned memory takes long to get, and steps need the same sizes.

batch k      take 4 MB, take 1 MB, give 4 MB, take 4 MB, give ...      nothing new
batch k + n  what nobody has taken for n batches goes
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

Size = tuple[int, torch.dtype]

_PATIENCE = 16  # batches


class HostPool:
    """Flat buffers in host memory, lent and given back.

    Args:
        make: Returns new host memory of the shape and format of a tensor.

    Attributes:
        num_bytes: Bytes of all buffers, lent ones included.
        most_bytes: The most that they have been.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._free: dict[Size, list[Tensor]] = defaultdict(list)
        self._unused: dict[Size, int] = {}  # the fewest that have been free since the last trim
        self._num_batches = 0
        self.num_bytes = self.most_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer.

        Args:
            like: Tensor of shape (N,) in the format of the buffer.
        """
        size = like.numel(), like.dtype
        free = self._free[size]
        if not free:
            self.num_bytes += like.numel() * like.itemsize
            self.most_bytes = max(self.most_bytes, self.num_bytes)
            return self._make(like)
        buffer = free.pop()
        self._unused[size] = min(self._unused.get(size, 0), len(free))
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, to be lent again."""
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def note_batch(self) -> None:
        """Note that a batch begins; let go of buffers that were free for some batches."""
        self._num_batches += 1
        if self._num_batches % _PATIENCE:
            return
        for size, unused in self._unused.items():
            for buffer in self._free[size][:unused]:
                self.num_bytes -= buffer.numel() * buffer.itemsize
            del self._free[size][:unused]
        self._free = defaultdict(list, {size: free for size, free in self._free.items() if free})
        self._unused = {size: len(free) for size, free in self._free.items()}
