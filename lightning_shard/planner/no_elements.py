"""Modules and batches without elements, and the bytes that they would take.

The stand-ins are torch's fake tensors: they know shape, format, device and which storage they
share, and take neither memory nor arithmetic. They stand on the CPU, where attention saves as
little for backward as it does on GPUs.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import lightning_utilities.core.apply_func as apply_func
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_shard.data_parallel.offload.activations import stretch_bytes
from lightning_shard.data_parallel.recomputation import observed_by
from lightning_shard.data_parallel.torch_private import FakeTensorMode, storage_key
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor

M = TypeVar("M", bound=nn.Module)


class NoElements:
    """Makes stand-ins that take part in one computation."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a stand-in of the same shape and strides, of format `dtype` if it is real."""
        kind = dtype if dtype is not None and like.is_floating_point() else like.dtype
        with self._mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=kind, device="cpu")

    def batch(self, batch: Any) -> Any:
        """Return a batch to compute with; tensors that have elements stay as they are.

        Whole numbers on meta become zeros, which are indices in any range: code may read them.
        """

        def present(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor.cpu()
            if tensor.is_floating_point() or tensor.is_complex():
                return self.tensor(tensor)
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

        return apply_func.apply_to_collection(batch, Tensor, present)

    def module(
        self, module: M, *, dtype: torch.dtype | None = None, left_out: Iterable[object] = ()
    ) -> M:
        """Copy a module with stand-ins for its parameters and buffers; ties stay ties.

        Args:
            module: The module to copy, on any device, meta included.
            dtype: Format of real parameters and buffers; None leaves each its own.
            left_out: Objects that the module refers to and the copy must not.
        """
        memo: dict[int, Any] = {id(one): None for one in left_out}
        for param in module.parameters():
            stand_in = self.tensor(param, dtype)
            memo[id(param)] = nn.Parameter(stand_in, requires_grad=param.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = self.tensor(buffer, dtype)
        return copy.deepcopy(module, memo)


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that are kept for backward while it is entered, each storage once.

    Kept are the tensors that autograd saves, and those that checkpoints do.

    Args:
        known: Tensors that are held anyway, and do not count.

    Attributes:
        recomputed: Bytes of the largest recomputation inside `backward`, without what is kept.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self.recomputed = 0
        self._known = {storage_key(one): one for one in known}
        self._kept: dict[int, Tensor] = {}
        self._staying: set[int] = set()
        self._observing = ExitStack()

    def __enter__(self) -> "SavedBytes":  # type: ignore[override]
        super().__enter__()
        self._observing.enter_context(observed_by(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._observing.close()
        super().__exit__(*error)

    def _note(self, tensor: Tensor) -> Tensor:
        self.keep([tensor])
        return tensor

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept, also outside of autograd."""
        for tensor in map(_local, tensors):
            if storage_key(tensor) not in self._known:
                self._kept.setdefault(storage_key(tensor), tensor)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that the device has until backward, also where activations are offloaded."""
        self._staying |= {storage_key(_local(one)) for one in tensors}

    def backward(self) -> AbstractContextManager[None]:
        """Make the context of a backward, in which recomputations are counted."""
        return observed_by(self)

    @contextmanager
    def recomputing(self, tensors: Iterable[Tensor]) -> Iterator[Callable[[Tensor], None]]:
        """Count what one recomputation saves."""
        held = (
            {storage_key(_local(one)) for one in tensors} | self._known.keys() | self._kept.keys()
        )
        found: list[Tensor] = []

        def note(tensor: Tensor) -> None:
            if storage_key(tensor) not in held:
                found.append(tensor)

        try:
            yield note
        finally:
            self.recomputed = max(self.recomputed, storage_bytes(found))

    @property
    def total(self) -> int:
        """Number of bytes counted so far."""
        return storage_bytes(self._kept.values())

    @property
    def moving(self) -> tuple[int, ...]:
        """The bytes of each stretch of memory that goes to the host under offload, in order."""
        leaving = [one for key, one in self._kept.items() if key not in self._staying]
        return tuple(filter(None, map(stretch_bytes, leaving)))


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.part.local if isinstance(tensor, DimShardedTensor) else tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of some stand-ins, which have no addresses."""
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
