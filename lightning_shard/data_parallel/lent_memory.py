"""Full memory for user code that asks where the elements of a shard lie.

    shard.numpy(), .data_ptr(), .untyped_storage() ──> memory of all elements, gathered now
    what is written there                          ──> back into the shards, with the next operation
    the hook or step ends                          ──> the memory goes, unless user code holds it

A shard has no memory of its own shape, so that an address or a storage of it would be another
tensor's, or nobody's: files and arrays were garbage. Each rank must ask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_shard.data_parallel.sharded_tensor import ShardedTensor
from lightning_shard.data_parallel.torch_private import storage_key, storage_uses
from lightning_shard.tensor_calls import BY_OBJECT


@dataclass(eq=False)
class _Lent:
    """Memory that user code was given.

    Attributes:
        shard: This rank's elements, with their spread.
        full: The memory: all elements.
        own: This rank's elements as they lay in the memory when it was last compared.
        is_by_address: Whether user code may know the address, and hold nothing.
        is_stale: Whether the shards have changed since.
    """

    shard: ShardedTensor
    full: Tensor
    own: Tensor
    is_by_address: bool
    is_stale: bool = False

    def take_back(self) -> None:
        """Write to the shard what user code has written to the memory."""
        own = self._cut()
        if not torch.equal(own.view(torch.uint8), self.own.view(torch.uint8)):
            self.shard.local.copy_(own.view(self.shard.local.shape))
            self.own = own.clone()
            if self.shard.on_change is not None:
                self.shard.on_change()

    def renew(self, full: Tensor) -> None:
        """Let the memory have the elements as they are now."""
        if full is not self.full:
            self.full.copy_(full)
        self.own, self.is_stale = self._cut().clone(), False

    def _cut(self) -> Tensor:
        own = self.shard.spread.cut(self.full, self.shard.local)
        assert own is not None
        return own.reshape(-1).contiguous()


class LentMemory:
    """The memory of an engine's shards that user code was given and may write to."""

    def __init__(self) -> None:
        self._lent: dict[tuple[int, int, int], _Lent] = {}

    @torch.no_grad()
    def of(self, shard: ShardedTensor, function: str) -> Tensor:
        """Return all elements in memory that stays as long as user code may use it.

        What is known by its address is there for the next one to ask, so that rank 0 alone may
        write a file of tensors whose storages all ranks have compared, as Hugging Face's does.

        Args:
            shard: What user code asks of; each rank must call.
            function: Name of the function that user code has called.
        """
        known = self._lent.get(_key(shard))
        if known is not None and known.is_by_address and not known.is_stale:
            return known.full.view(shard.shape)
        full = shard.full_tensor().view(shard.spread.shape).contiguous()
        for key, lent in list(self._lent.items()):
            if not lent.is_by_address and storage_uses(lent.full) == 1:
                lent.take_back()
                del self._lent[key]
        fresh = _Lent(shard, full, full, is_by_address=False)
        lent = self._lent.setdefault(_key(shard), fresh)
        lent.renew(full)
        lent.is_by_address |= function not in BY_OBJECT
        return lent.full.view(shard.shape)

    @torch.no_grad()
    def take_back(self, shard: ShardedTensor) -> None:
        """Write to a shard what user code has written to memory of its elements."""
        lent = self._lent.get(_key(shard)) if self._lent else None
        if lent is not None:
            lent.take_back()

    def changed(self) -> None:
        """Take note that shards have changed, on all ranks alike."""
        for lent in self._lent.values():
            lent.is_stale = True

    @torch.no_grad()
    def end(self) -> None:
        """Write to all shards what user code has written, and let the memory go."""
        lent, self._lent = self._lent, {}
        for one in lent.values():
            one.take_back()


def _key(shard: ShardedTensor) -> tuple[int, int, int]:
    return id(shard.spread), storage_key(shard.local), int(shard.local.storage_offset())
