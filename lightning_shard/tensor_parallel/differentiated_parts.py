"""What a step differentiates by a tensor of which each rank has a part.

loss.backward(inputs=[weight])       autograd gets the part, and adds to its gradient
torch.autograd.grad(loss, weight)    by a rule of `dim_sharded_operations`
"""

from collections.abc import Sequence
from typing import Any

from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.tensor_parallel.dim_sharded_tensor import own_part


class DifferentiatedParts:
    """Gives autograd this rank's parts of the tensors that a backward is told to stop at."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs; see `Differentiator`."""
        return run([own_part(one) for one in inputs])
