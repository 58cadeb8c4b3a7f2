"""The memory of flat buffers: the backend chooses it, so that ranks reach what moves often best.

Blanks are memory whose elements tell whether they were written, by a NaN that nothing computes.
While a module loads a checkpoint, its parameters are full and hold blanks: elements that its own
hooks leave alone keep the value that the shards have.

Stage 3 frees memory that its views still lie in. User code may lie in it, too: `w.detach()` of a
weight that was full. Autograd's graphs do, and get the elements back before they are read.
"""

import gc
import warnings
from collections.abc import Sequence
from itertools import compress
from weakref import ref

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import FlatLayout
from lightning_shard.data_parallel.torch_private import (
    FakeTensor,
    count_saved,
    kept_by_contexts,
    storage_uses,
    tensors_at,
)

_BLANKS = {  # by element: integers of the same size, and the bits of a quiet NaN with a payload
    torch.float64: (torch.int64, 0x7FF85A17E5A17E5A),
    torch.float32: (torch.int32, 0x7FC5A17E),
    torch.bfloat16: (torch.int16, 0x7FC5),
    torch.float16: (torch.int16, 0x7E5A),
}


def full_views(full: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return the full-shaped view of each slot of a full-sized flat tensor."""
    parts = full.split_with_sizes(layout.part_numels)[1::2]
    return [part.view(slot.shape) for part, slot in zip(parts, layout.slots, strict=True)]


def shard_views(shard: Tensor, layout: FlatLayout, index: int) -> list[Tensor]:
    """Return one rank's 1-D part of each slot, possibly empty, in its shard, shape (S,)."""
    return [shard[part.shard_offset : part.shard_stop] for part in layout.shard_slices(index)]


class FlatMemory:
    """Makes flat buffers that the operations of a group move."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def like(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a buffer of as many elements as another, with any content."""
        return self._ranks.new_empty(flat, flat.numel(), dtype)

    def zeros(self, like: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of zeros, of the kind of tensor that `like` is."""
        return self._ranks.new_empty(like, numel, dtype, device).zero_()

    def copy(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a buffer, in another format if one is given."""
        return self.like(flat, dtype or flat.dtype).copy_(flat)


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of blanks on the CPU; of zeros in a format that has no blanks."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in _BLANKS:
        return torch.zeros(shape, dtype=dtype)
    whole_numbers, bits = _BLANKS[real]
    if dtype.is_complex:
        parts = torch.full((*shape, 2), bits, dtype=whole_numbers).view(real)
        return torch.view_as_complex(parts)
    return torch.full(tuple(shape), bits, dtype=whole_numbers).view(real)


def is_blank(values: Tensor) -> Tensor:
    """Return by element whether it is still blank; shaped as `values`."""
    if values.is_complex():
        return is_blank(torch.view_as_real(values)).all(-1)
    if values.dtype not in _BLANKS:
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    whole_numbers, bits = _BLANKS[values.dtype]
    return values.contiguous().view(whole_numbers) == bits


def overwrite(view: Tensor, value: Tensor) -> None:
    """Write a tensor over another of its shape, all but its blanks."""
    kept = is_blank(value)
    if kept.any():
        value = torch.where(kept, view.to(value), value)
    view.copy_(value)


class MemoryHolders:
    """Knows whether user code holds the memory of a flat buffer, to which autograd may hold on.

    1 full, n views                     the engine's own
    2 saved by the block's graphs       counted once in the graph, then known by their number
    1 set on a function's context       looked for in the graph: bitsandbytes' packed weights
    1 `self.kept = weight.detach()`     user code's: the memory may not be freed
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._own = names, 1 + len(names)
        self._saved: dict[int, int] = {}  # by graphs, by the number of all others who hold it
        self._before = 0  # what graphs had saved the last time
        self._of_contexts: list[ref[Tensor]] = []
        self._looked_at = set[int]()  # the numbers of holders of which was said who they are

    def are_there(self, memory: Tensor, ends: Sequence[Tensor] | None) -> bool:
        """Whether user code holds the memory now.

        `ends` are outputs of a graph that has been made since the last time; None says that no
        graph is there, or is left.
        """
        if isinstance(memory, FakeTensor):  # of a dry run, in which the simulation holds some, too
            return False
        others, before = self._num_others(memory), self._before
        if ends and others > 0 and others not in self._saved:
            self._of_contexts += map(ref, kept_by_contexts(memory, ends))
            others = self._num_others(memory)
        if ends and others > 0 and others not in self._saved:
            found = count_saved(memory, ends, others)
            goes_on = found > before  # from the calls before, else it is another graph beside them
            self._saved[others] = found if goes_on else found + before
        self._before = 0 if ends is None else self._saved.get(others, 0)
        return others > self._before

    def _num_others(self, memory: Tensor) -> int:
        """Return how often the memory is held by others than the engine and contexts."""
        alive = {id(one): one for known in self._of_contexts if (one := known()) is not None}
        self._of_contexts = [ref(one) for one in alive.values()]
        return storage_uses(memory) - self._own - len(alive)

    def warn(self, memory: Tensor, views: Sequence[Tensor]) -> None:
        """Say of which parameters, with these views, user code holds memory after an update."""
        others, own = storage_uses(memory), {id(memory), *map(id, views)}
        own |= {id(known()) for known in self._of_contexts}
        if others in self._looked_at:  # the search takes long
            return
        self._looked_at.add(others)
        gc.collect()  # what nobody reaches any more, such as a traced graph of torch.func's
        at = [one.data_ptr() for one in tensors_at(memory) if id(one) not in own]
        held = [any(0 <= one - view.data_ptr() < view.nbytes for one in at) for view in views]
        if any(held):  # else it is a graph, which torch refuses to run
            warnings.warn(
                f"What was made of {', '.join(map(repr, compress(self._names, held)))} in a step, "
                f"block or hook (.detach(), .data, a slice, .numpy() ...) is still held after an "
                f"update, but each rank has a shard by now: it shows the values of before the "
                f"update, at least until the block is gathered again, and keeps memory. Keep a "
                f"copy, .clone(), or the parameter itself.",
                stacklevel=2,
            )
