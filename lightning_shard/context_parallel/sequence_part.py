"""One rank's part of a sequence, which looks whole to the code of an unmodified block.

    block(x)    x of shape (B, S, E), of which this rank has (B, S / W, E)

    norm, linear, gelu, +, views, rotary embeddings      on the part
    scaled_dot_product_attention, MultiheadAttention     heads for positions, and back
    x + whole tensor of S positions                      the own positions of it are taken
    anything else (convolutions, pooling, a scan)        on the gathered sequence

So a block's own code sees every shape that it sees on a single device, and what has no rule is
right, too: it is computed whole, alike on each rank. That costs what the cut would save, so the
operations are noted by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.context_parallel.crossings import (
    cut_sequence,
    gather_sequence,
    share_whole,
)
from lightning_shard.context_parallel.whole_sequences import WholeSequences
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part

RULES: dict[str, Callable[..., Any]] = {}
"""Rules by operation; `operations` and `attention` fill it."""


@dataclass(frozen=True, kw_only=True)
class SequencePart(Part):
    """One rank's part of a tensor along the sequence; see the module.

    Attributes:
        whole: Hears of the operations that need the whole sequence.
    """

    whole: WholeSequences

    own_rules: ClassVar[Mapping[str, Callable[..., Any]]] = RULES

    @override
    def note_gather(self, func: Callable[..., Any]) -> None:
        self.whole.note(func)

    @override
    def split(self, value: Tensor, dim: int) -> Tensor:
        return self._by_block(cut_sequence, value, dim)

    @override
    def gather(self) -> Tensor:
        return self._by_block(gather_sequence, self.local, self.dim)

    @override
    def shared(self, value: Any) -> Any:
        """Return a value that every rank uses with its part.

        A parameter's gradient is averaged over the ranks by the engine, that of anything else here.
        """
        follows = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        if not follows or isinstance(value, nn.Parameter) or is_of_parameters(value):
            return value
        return share_whole(value, self.group)

    @override
    def wide_gradient(self, local: Any) -> Any:
        return self.widen(local / self.group.size if isinstance(local, Tensor) else local)

    @override
    def own_gradient(self, value: Any) -> Any:
        own = self.narrow(value)
        return own * self.group.size if isinstance(own, Tensor) else own


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
