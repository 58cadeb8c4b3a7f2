"""Modules and batches without elements.

The stand-ins are torch's fake tensors: they know shape, format, device and which storage they
share, and take neither memory nor arithmetic. They stand on the CPU, where attention saves as
little for backward as it does on GPUs.
"""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import lightning_utilities.core.apply_func as apply_func
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.torch_private import FakeTensorMode

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
