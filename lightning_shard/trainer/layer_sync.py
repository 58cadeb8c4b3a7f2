"""`Trainer(sync_batchnorm=True)` on CPU ranks, and on ranks that are not all data parallel.

On a pipeline's stage only the batch norms of its own layers have a batch: the others compute on
placeholders, for which nothing is synchronised.
"""

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.sync_batch_norm import sync_batch_norm
from lightning_shard.data_parallel.torch_private import BatchNorm
from lightning_shard.placeholders import is_placeholder


def layer_sync_over(
    data: Collectives, configured: LayerSync | None, device: torch.device, num_ranks: int
) -> LayerSync | None:
    """Return who synchronises the layers of a run.

    Args:
        data: Group of the ranks whose batches count.
        configured: Lightning's, which the user has asked for; None where nobody has.
        device: Device of this rank.
        num_ranks: Number of all ranks.
    """
    # torch's refuses the CPU, and synchronises all ranks of the world
    is_ours = device.type == "cpu" or data.size < num_ranks
    if isinstance(configured, TorchSyncBatchNorm) and is_ours:
        return SyncBatchNormOnCpu(data)
    return configured


class SyncBatchNormOnCpu(LayerSync):
    """Gives every batch norm a forward over all ranks; the modules themselves stay.

    Args:
        collectives: Group of the ranks whose batches count.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for module in batch_norms(model):
            module.forward = self._forward_of(module)  # type: ignore[assignment, method-assign]
        return model

    def _forward_of(self, module: BatchNorm) -> "_Forward":
        return _Forward(module, self._collectives)

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for module in batch_norms(model):
            module.__dict__.pop("forward", None)
        return model


class _Forward:
    """The forward of one batch norm while ranks are synchronised."""

    def __init__(self, module: BatchNorm, collectives: Collectives) -> None:
        self._module = module
        self._collectives = collectives

    def __call__(self, batch: Tensor) -> Tensor:
        weight = self._module.weight if self._module.affine else batch
        if not self._module.training or is_placeholder(batch) or is_placeholder(weight):
            return type(self._module).forward(self._module, batch)
        return sync_batch_norm(self._module, batch, self._collectives)


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of a model."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]
