"""A stretch of memory that backward needs: on its way to the host, there, or on its way back.

    LEAVING ──leave──> AWAY ──bring──> COMING ──here──> BACK
       └───────────── here: it has not left yet ─────────^

The source is held until the copy down is done, as far as the streams can tell.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.errors import ConfigError

Size = tuple[int, torch.dtype]

_PATIENCE = 16  # batches


class HostPool:
    """Flat buffers in host memory, lent and given back.

        batch k      take 4 MB, take 1 MB, give 4 MB, take 4 MB, give ...      nothing new
        batch k + n  what nobody has taken for n batches goes

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
        """Return a buffer for a tensor of shape (N,)."""
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


class ChangedError(ConfigError):
    """A tensor that backward needs was changed in place since forward.

    Its memory should have been changed `expected` times, and was `found` times.
    """

    def __init__(self, shape: Sequence[int], found: int | None, expected: int) -> None:
        super().__init__(
            f"A tensor of shape {tuple(shape)} that backward needs has been modified by an inplace "
            f"operation since forward saved it: it is at version {found}, expected version "
            f"{expected}. Use x = x + y for x += y there, or clone() it before."
        )


class Stretch:
    """Elements of one storage, from forward to backward.

    Attributes:
        is_leaving: Whether the source is held.
        is_ahead: Whether it was brought before anyone asked for it.
    """

    def __init__(
        self,
        tensor: Tensor,
        ends: tuple[int, int],
        copier: HostCopier,
        pool: HostPool,
        on_end: Callable[["Stretch"], None],
    ) -> None:
        # which keeps the storage's number from others
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._copier, self._pool, self._on_end = copier, pool, on_end
        self._shape, self._version = tuple(tensor.shape), tensor._version
        self.first, numel = ends[0], ends[1] - ends[0]
        # which shares the tensor's version, so that changes of any view are seen
        self._device: Tensor | None = tensor.detach().as_strided((numel,), (1,), self.first)
        self.num_bytes = numel * tensor.itemsize
        self.is_leaving, self.is_ahead = True, False
        self._changed: int | None = None
        self._host = pool.take(self._device)
        self._mark = copier.copy("down", self._device, self._host)

    @property
    def is_away(self) -> bool:
        """Whether the elements are in host memory alone."""
        return self._device is None

    def leave(self) -> None:
        """Let go of the source, once the current stream has come to the end of the copy."""
        assert self._device is not None
        self._copier.follow(self._mark)
        self._changed = self._device._version
        self._device, self.is_leaving = None, False

    def bring(self) -> None:
        """Start the copy back to the device."""
        self._device = self._copier.empty_on_device(self._host)
        self._mark = self._copier.copy("up", self._host, self._device)

    def elements(self) -> Tensor:
        """Return the elements (N,) on the device, for what the current stream does next.

        Raises:
            ConfigError: They were changed after they had been saved.
        """
        assert self._device is not None
        if not self.is_leaving:
            self._copier.follow(self._mark)
        version = self._device._version if self.is_leaving else self._changed
        if version != self._version:
            raise ChangedError(self._shape, version, self._version)
        return self._device

    def __del__(self) -> None:
        """Give all memory back; copies that still go on come first."""
        if self._device is not None:
            self._copier.follow(self._mark)
        self._pool.give(self._host)
        self._on_end(self)
