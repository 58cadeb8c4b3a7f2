"""A forward and a backward, on a single device or on a rank of an engine."""

from collections.abc import Callable

from torch import Tensor

from lightning_shard.data_parallel.engine import DataParallelEngine


def forward_and_backward(
    engine: DataParallelEngine | None, forward: Callable[[], Tensor]
) -> Tensor:
    """Return the loss that `forward` computes, once its gradients are there."""
    if engine is None:
        loss = forward()
        loss.backward()
        return loss.detach()
    with engine.step():
        loss = forward()
    with engine.backward():
        loss.backward()
    return loss.detach()
