"""The elements that are known although the device has none: of small tensors the host has sent.

    host ──copy──> device ──all ranks alike: a reduction leaves them──> host reads what it sent

Without them an agreement of the ranks would come back as nothing that anybody has said. An
operation that writes into a storage makes its elements unknown.
"""

import weakref

import torch
from torch import Tensor

_LARGEST = 1 << 16  # elements


class Contents:
    """Elements by the storage that they lie in."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def sent(self, source: Tensor, target: Tensor) -> None:
        """Note that `target`, a whole storage on the device, holds what `source` does."""
        if source.numel() > _LARGEST or not target.is_contiguous() or target.storage_offset():
            return
        key = self._key(target)
        self._known[key] = source.detach().to(target.dtype).reshape(-1).clone()
        weakref.finalize(target.untyped_storage(), self._known.pop, key, None)

    def written(self, tensor: Tensor) -> None:
        """Note that an operation has written into a tensor's storage."""
        self._known.pop(self._key(tensor), None)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor's elements on the CPU, zeros where they are not known."""
        elements = self._known.get(self._key(tensor))
        if elements is None or elements.dtype != tensor.dtype:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return elements.as_strided(
            tensor.shape, tensor.stride(), int(tensor.storage_offset())
        ).clone()
