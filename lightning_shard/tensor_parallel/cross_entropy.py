"""Cross entropy of logits whose classes are sharded over the ranks, without gathering them.

    rank 0   x[:, :V/2]  ──► max, sum(exp(x - max)), x[target] if it is here ─┐
                                                                              ├─ all-gather
    rank 1   x[:, V/2:]  ──► max, sum(exp(x - max)), x[target] if it is here ─┘

    x          the rank's logits, (N, V / W): saved for backward, in their own dtype
    loss       = a (lse - x[target]) + e (sum(w) lse - w . x)     a = (1 - smoothing) w[target]
    gradient   = softmax (a + e sum(w)) - a onehot - e w          e = smoothing / V

The softmax is exp(x - max) / sum: log(sum) + max, rounded once more, would put a whole row off. The
gradient needs no exchange at all.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import is_narrow
from lightning_shard.data_parallel.torch_private import FakeTensor, untraced
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.regions import all_gathered, copy_to_region, reduce_from_region


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of `torch.nn.functional.cross_entropy`, the same on every rank."""

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


@untraced
def parallel_cross_entropy(
    local: Tensor, target: Tensor, options: LossOptions, group: Collectives
) -> Tensor:
    """Return the cross entropy; each rank of the group must call.

    Args:
        local: Shape (..., V / W), this rank's classes, in rank order; floating point.
        target: Shape (...), class indices of 0 to V - 1, the same on every rank.
        options: Options of `torch.nn.functional.cross_entropy`.
        group: Group of the W ranks that share the classes.

    Returns:
        The loss, float32 under autocast, else of the logits' dtype. On accelerators a row whose
        target is out of range is NaN.
    """
    if local.shape[:-1] != target.shape:
        raise ConfigError(
            f"Rank {group.rank}: cross_entropy got logits for {tuple(local.shape[:-1])} and "
            f"targets of shape {tuple(target.shape)}, expected the same. Flatten both alike."
        )
    rows, flat = local.reshape(-1, local.shape[-1]), target.reshape(-1)
    counted = flat != options.ignore_index
    flat = flat.masked_fill(~counted, 0)
    _check_range(flat, rows.shape[-1] * group.size, group)
    share = counted.to(_wide(rows.dtype))  # (N,): the weight of each row
    if options.weight is not None:
        share = share * options.weight.to(share.dtype)[flat]
    losses: Tensor = _CrossEntropy.apply(rows, flat, counted, share, options, group)  # type: ignore[no-untyped-call]
    is_autocast = torch.is_autocast_enabled(local.device.type)  # then the loss is in float32
    dtype = _wide(local.dtype) if is_autocast else local.dtype
    return _reduced(losses, share, options.reduction, target.shape).to(dtype)


def _reduced(losses: Tensor, share: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / share.sum() if reduction == "mean" else losses.sum()


def _check_range(target: Tensor, num_classes: int, group: Collectives) -> None:
    if target.device.type == "cpu" and target.numel() and not isinstance(target, FakeTensor):
        low, high = (int(bound) for bound in torch.aminmax(target))
        if low < 0 or high >= num_classes:
            raise ConfigError(
                f"Rank {group.rank}: cross_entropy got targets from {low} to {high}, expected 0 to "
                f"{num_classes - 1}, or ignore_index."
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if is_narrow(dtype) else dtype


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; saves the logits as they are, and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (N, V / W)
        target: Tensor,  # (N,)
        counted: Tensor,
        share: Tensor,
        options: LossOptions,
        group: Collectives,
    ) -> Tensor:
        num_local = logits.shape[-1]
        own = target - group.rank * num_local
        is_on_other_ranks = (own < 0) | (own >= num_local)
        own = own.masked_fill(is_on_other_ranks, 0)
        spread = options.label_smoothing / (num_local * group.size)
        wide = logits.to(_wide(logits.dtype))
        weight: Tensor | None = None
        total_weight: Tensor | float = float(num_local * group.size)
        if options.weight is not None:
            weight = options.weight.chunk(group.size)[group.rank].to(wide.dtype)
            total_weight = options.weight.sum().to(wide.dtype)
        picked = wide.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(is_on_other_ranks, 0)
        own_max = wide.amax(-1).clamp_min(torch.finfo(wide.dtype).min)  # all of it may be -inf
        numbers = [own_max, (wide - own_max.unsqueeze(-1)).exp_().sum(-1), picked]
        if spread:
            numbers.append(wide.sum(-1) if weight is None else wide @ weight)
        every = all_gathered(torch.stack(numbers)[None], 0, group)  # (W, 3 or 4, N)
        highest = every[:, 0].amax(0)
        total = (every[:, 1] * (every[:, 0] - highest).exp()).sum(0)
        picked = every[:, 2].sum(0)
        nowhere = (target < 0) | (target >= num_local * group.size)
        spread_total = spread * total_weight

        per_row = (1 - options.label_smoothing) * share
        losses = per_row * (total.log() + (highest - picked.masked_fill(nowhere, torch.nan)))
        if spread:
            losses = losses + spread_total * (total.log() + highest) - spread * every[:, 3].sum(0)
        ctx.save_for_backward(
            logits, highest, total, own, is_on_other_ranks, counted, per_row, weight
        )
        ctx.spread, ctx.spread_total, ctx.group = spread, spread_total, group
        return losses.masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, highest, total, own, is_on_other_ranks, counted, per_row, weight = ctx.saved_tensors
        grad = grad.masked_fill(~counted, 0)
        result = (logits.to(total.dtype) - highest.unsqueeze(-1)).exp_()
        if torch.is_grad_enabled():  # to be differentiated once more, by a gradient penalty
            summed = reduce_from_region(result.sum(-1), ctx.group)
            grad, total = copy_to_region(grad, ctx.group), copy_to_region(summed, ctx.group)
        factor = (grad * (per_row + ctx.spread_total) / total).unsqueeze(-1)
        result = result * factor if torch.is_grad_enabled() else result.mul_(factor)
        at_target = (-grad * per_row).masked_fill(is_on_other_ranks, 0)
        result.scatter_add_(-1, own.unsqueeze(-1), at_target.unsqueeze(-1))
        if ctx.spread:
            even = (grad * ctx.spread).unsqueeze(-1)
            result.sub_(even if weight is None else even * weight)
        return result.to(logits.dtype), None, None, None, None, None
