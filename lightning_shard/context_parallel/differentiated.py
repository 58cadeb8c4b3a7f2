"""What a step differentiates by itself: each rank has a summand, and the step expects the gradient.

Source: the convention of `crossings`: the mean over the ranks is the gradient everywhere.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.crossings import total
from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.tensor_parallel.differentiated_parts import DifferentiatedParts


class MeanGradients(DifferentiatedParts):
    """Averages the gradients of full tensors over the ranks that share each sequence.

    Args:
        group: Group of the W ranks, each of which must differentiate.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs; see `Differentiator`."""
        found = super().differentiate(inputs, run, accumulates=accumulates)
        if accumulates:  # the engine averages them
            return found
        are_full = [isinstance(one, Tensor) for one in inputs]  # an edge stands for a part
        return tuple(
            total(grad / self._group.size, self._group) if is_full and grad is not None else grad
            for is_full, grad in zip(are_full, found, strict=True)
        )
