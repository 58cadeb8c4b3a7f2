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
    """Counts, on one thread, the storages that operations inside have made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, StorageWeakRef] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in _on_cpu((args, kwargs))}
        for tensor in _on_cpu(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # a view of what was there is not made here
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


def _on_cpu(nested: Any) -> list[Tensor]:
    leaves = tree_leaves(nested)
    return [one for one in leaves if isinstance(one, Tensor) and one.device.type == "cpu"]
