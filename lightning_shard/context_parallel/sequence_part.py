"""One rank's part of a sequence, which looks full to the code of an unmodified block.

    block(x)    x of shape (B, S, E), of which this rank has (B, S / W, E)

    norm, linear, gelu, +, views, rotary embeddings      on the part
    scaled_dot_product_attention, MultiheadAttention     heads for positions, and back
    x + full tensor of S positions                      the own positions of it are taken
    anything else (convolutions, pooling, a scan)        on the gathered sequence

What has no rule is right, too, but costs what the cut would save: such operations are noted by
name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.crossings import cut_sequence, gather_sequence, share_full
from lightning_shard.core.tensor_calls import Function
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part
from lightning_shard.tensor_parallel.regions import gather_to_region, own_slice


class FullSequences:
    """Notes the operations that ranks compute on full sequences."""

    def __init__(self, num_ranks: int) -> None:
        self.block: str | None = None
        self.noted: dict[str, str] = {}
        self._num_ranks = num_ranks

    def note(self, func: Function) -> None:
        """Hear of an operation, and warn of it where it is the first of its name."""
        name = getattr(func, "__name__", "") or str(func)
        if self.block is None or name in self.noted:
            return
        self.noted[name] = self.block
        rank_zero_warn(
            f"The block {self.block!r} calls {name!r}, which has no rule for a part of a sequence: "
            f"each of the {self._num_ranks} context-parallel ranks computes it on the full "
            f"sequence. The result is the same; the memory and time of it are those of one rank."
        )


RULES: dict[str, Function] = {}
"""Rules by operation; `operations` and `attention` fill it."""


@dataclass(frozen=True, kw_only=True)
class SequencePart(Part):
    """One rank's part of a tensor along the sequence; see the module."""

    in_full: FullSequences
    padding: int = 0

    own_rules: ClassVar[Mapping[str, Function]] = RULES
    has_own_rows: ClassVar[bool] = True

    @override
    def note_gather(self, func: Function) -> None:
        self.in_full.note(func)

    @property
    @override
    def width(self) -> int:
        return self.local.shape[self.dim] * self.group.size - self.num_blocks * self.padding

    @override
    def own_length(self, length: int) -> int | None:
        if not self.padding:
            return super().own_length(length)
        is_same = length * self.num_blocks == self.width
        return self.local.shape[self.dim] // self.num_blocks if is_same else None

    @override
    def is_like(self, other: Part) -> bool:
        is_padded_alike = isinstance(other, SequencePart) and other.padding == self.padding
        return is_padded_alike and super().is_like(other)

    @override
    def split(self, value: Tensor, dim: int) -> Tensor:
        return self._by_block(self._cut, value, dim)

    @override
    def gather(self) -> Tensor:
        return self._by_block(self._gathered, self.local, self.dim)

    @override
    def gather_detached(self) -> Tensor:
        return self._by_block(self._gathered, self.local.detach(), self.dim)

    @override
    def narrow(self, value: Any) -> Any:
        if isinstance(value, DimShardedTensor) or not isinstance(value, Tensor):
            return super().narrow(value)
        return self._by_block(self._sliced, value, self.dim)

    @override
    def shared(self, value: Any) -> Any:
        """Return a value that every rank uses with its part.

        A parameter's gradient is averaged over the ranks by the engine, that of anything else here.
        """
        follows = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        if not follows or isinstance(value, nn.Parameter) or is_of_parameters(value):
            return value
        return share_full(value, self.group)

    @override
    def full_operand(self, value: Any) -> Any:
        own = part_of(value)
        if own is None or own.num_blocks > 1 or own.group is not self.group:
            return super().full_operand(value)
        full = gather_to_region(own.local, own.dim, own.group)
        return own.without_padding(full, own.dim)  # its gradient is the sum of all ranks' rows'

    @override
    def wide_gradient(self, local: Any) -> Any:
        return self.widen(local / self.group.size if isinstance(local, Tensor) else local)

    @override
    def own_gradient(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DimShardedTensor):
            return value.part.local * self.group.size
        return self.own_filled(value, self.dim, 0) * self.group.size

    def own_filled(self, value: Tensor, dim: int, fill: float) -> Tensor:
        """Return this rank's part of a full tensor along `dim`, with `fill` as padding."""

        def sliced(tensor: Tensor, place: int, group: Collectives) -> Tensor:
            after = [0, 0] * (tensor.ndim - 1 - place) + [0, self.padding]
            filled = functional.pad(tensor, after, value=fill) if self.padding else tensor
            return own_slice(filled, place, group)

        return self._by_block(sliced, value, dim)

    def own_positions(self) -> Tensor:
        """Return this rank's elements without padding, with a dimension for blocks."""
        blocks: Tensor = self.local.unflatten(self.dim, (self.num_blocks, -1))  # type: ignore[no-untyped-call]
        num_places, place = blocks.shape[self.dim + 1], self.dim + 1
        left = self.width // self.num_blocks - self.group.rank * num_places
        return blocks.narrow(place, 0, min(max(left, 0), num_places))

    def without_padding(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the positions of a tensor that has all places along a dimension of one block."""
        return tensor.narrow(dim, 0, tensor.shape[dim] - self.padding) if self.padding else tensor

    def _cut(self, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        return cut_sequence(padded(tensor, dim, self.padding), dim, group)

    def _gathered(self, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        return self.without_padding(gather_sequence(tensor, dim, group), dim)

    def _sliced(self, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        return own_slice(padded(tensor, dim, self.padding), dim, group)


def padded(tensor: Tensor, dim: int, padding: int) -> Tensor:
    """Append copies of the last position: values that a model can compute with."""
    if not padding:
        return tensor
    last = tensor.detach().narrow(dim, tensor.shape[dim] - 1, 1)
    shape = [padding if place == dim else -1 for place in range(tensor.ndim)]
    return torch.cat([tensor, last.expand(shape)], dim)


def is_of_parameters(value: Tensor, most: int = 8) -> bool:
    """Whether a value is computed from leaves of the graph only, in at most so many operations."""
    if type(value) is not Tensor:
        return False
    found, left = [value.grad_fn], most
    while found:
        node = found.pop()
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):  # type: ignore[attr-defined]
                return False
            continue
        left -= 1
        if left < 0:
            return False
        found += [one for one, _ in node.next_functions]
    return value.grad_fn is not None


def part_of(value: Any) -> SequencePart | None:
    """Return the part of a tensor that is cut along the sequence; None for any other value."""
    if isinstance(value, DimShardedTensor) and isinstance(value.part, SequencePart):
        return value.part
    return None
