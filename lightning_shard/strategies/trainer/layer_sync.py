"""`Trainer(sync_batchnorm=True)` on CPU ranks, and on ranks that are not all data parallel.

On a pipeline's stage only the batch norms of its own layers have a batch: the others compute on
placeholders, for which nothing is synchronised.

torch's SyncBatchNorm refuses CPU tensors; here is one for any device and backend. The statistics
are those of the global batch: first the mean over all ranks, then the squared deviations from it
(two small sums; one pass over squares would lose digits). Both sums are part of the autograd graph.
"""

from typing import Any

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.data_parallel.torch_private import BatchNorm, check_batch_norm_input


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return _summed(tensor, collectives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(grads[0], ctx.collectives), None  # which has a backward, too


def _sum_over_ranks(tensor: Tensor, collectives: Collectives) -> Tensor:
    result: Tensor = _SumOverRanks.apply(tensor, collectives)  # type: ignore[no-untyped-call]
    return result


def _summed(tensor: Tensor, collectives: Collectives) -> Tensor:
    result = tensor.contiguous().clone()
    collectives.all_reduce(result).wait()
    return result


def sync_batch_norm(module: BatchNorm, batch: Tensor, collectives: Collectives) -> Tensor:
    """Normalise `batch` by the statistics of all ranks' batches, and update the running ones.

    Args:
        module: A batch norm in training mode.
        batch: Shape (B, C, ...); B may differ between ranks.
        collectives: The ranks whose batches count; each must call.

    Returns:
        The shape of `batch`.

    Source:
        Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm".
    """
    check_batch_norm_input(module, batch)
    dims = [dim for dim in range(batch.ndim) if dim != 1]
    shape = [1, -1] + [1] * (batch.ndim - 2)
    wide = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
    count = wide.new_tensor([wide.numel() / wide.shape[1]])
    sums = _sum_over_ranks(torch.cat([wide.sum(dims), count]), collectives)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centered = wide - mean.view(shape)
    variance = _sum_over_ranks(centered.square().sum(dims), collectives) / total
    _update_running(module, mean.detach(), variance.detach(), float(total))
    result = centered * torch.rsqrt(variance + module.eps).view(shape)
    if module.affine:
        result = result * module.weight.view(shape) + module.bias.view(shape)
    return result.to(batch.dtype)


@torch.no_grad()
def _update_running(module: BatchNorm, mean: Tensor, variance: Tensor, total: float) -> None:
    if not module.track_running_stats:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    factor = module.momentum
    if factor is None:
        factor = 1.0 / float(module.num_batches_tracked)
    unbiased = variance * (total / max(total - 1.0, 1.0))
    assert module.running_mean is not None
    assert module.running_var is not None
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)


def layer_sync_over(
    data: Collectives, configured: LayerSync | None, device: torch.device, num_ranks: int
) -> LayerSync | None:
    """Return who synchronises the layers of a run."""
    # torch's refuses the CPU, and synchronises all ranks of the world
    is_ours = device.type == "cpu" or data.size < num_ranks
    if isinstance(configured, TorchSyncBatchNorm) and is_ours:
        return SyncBatchNormOnCpu(data)
    return configured


class SyncBatchNormOnCpu(LayerSync):
    """Gives every batch norm a forward over all ranks; the modules themselves stay."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for module in batch_norms(model):
            synced: Any = _SyncedForward(module, self._collectives)
            module.forward = synced  # type: ignore[method-assign]
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for module in batch_norms(model):
            module.__dict__.pop("forward", None)
        return model


class _SyncedForward:
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
