"""Counts the bytes of the tensors that are alive on the CPU, and the most that there were."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class AliveBytes(TorchDispatchMode):
    """Counts, on one thread, the storages that operations inside have made.

    Attributes:
        peak: The most bytes that were alive after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, StorageWeakRef] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._made.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self._alive())
        return result

    def _alive(self) -> int:
        total = 0
        for key, reference in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._made[key]
            else:
                total += storage.nbytes()
        return total
