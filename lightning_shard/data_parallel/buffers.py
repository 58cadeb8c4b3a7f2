"""Buffers (running statistics, codebooks ...) follow rank 0 during training.

As torch DDP does, ranks take over rank 0's values at the start of a training step and of the first
evaluation step after one; unlike it, only those of floating point that belong to the `state_dict`,
so constant masks and caches cost nothing.
"""

import torch
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.known_modules import KnownModules
from lightning_shard.data_parallel.torch_private import is_persistent, with_buffers


class BufferSync:
    """Broadcasts a model's buffers from rank 0.

    Args:
        model: Model whose buffers are looked up at each call, since modules may replace them.
        collectives: Group of the data-parallel ranks.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._model, self._modules = model, KnownModules(model)
        self._collectives = collectives
        self._may_differ = False

    def broadcast_all(self) -> None:
        """Take over every buffer of rank 0; each rank must call."""
        self._broadcast([buffer for buffer in self._model.buffers() if buffer.numel()])

    def follow(self, *, training: bool) -> None:
        """At the start of a step, take over rank 0's changing buffers; each rank must call.

        Args:
            training: Whether this step may change buffers; of other steps in a row only the first
                finds something to take over.
        """
        if training or self._may_differ:
            self.broadcast_changing()
        self._may_differ = training

    def broadcast_changing(self) -> None:
        """Take over those of rank 0's buffers that training may change; each rank must call."""
        self._broadcast(self.changing())

    def changing(self) -> list[torch.Tensor]:
        """Return the buffers that training may change, in the same order on every rank."""
        return [
            buffer
            for module in with_buffers(self._modules.now())
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and buffer.numel() and is_persistent(module, name)
        ]

    @torch.no_grad()
    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        if self._collectives.size == 1:
            return
        for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in same])
            self._collectives.broadcast(flat, src=0).wait()
            parts = torch.split(flat, [buffer.numel() for buffer in same])
            for buffer, part in zip(same, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
