"""The norm of the full gradient, and clipping by it, from shards.

Among the ranks of one copy of the state each element of the gradient lies on exactly one (stages 1
to 3), or it is the same on every rank (stage 0), so sums over shards are summed over ranks once or
not at all. Parameters that are split over other ranks as well are summed over those, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.states import Asker, asker, having
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import shards_over
from lightning_shard.errors import ConfigError


@having(asker, value=Asker.ENGINE)
@torch.no_grad()
def global_grad_norm(
    params: Sequence[nn.Parameter], engine: DataParallelEngine, norm_type: float = 2.0
) -> Tensor:
    """The norm of the averaged gradient, shape (), in float32 or 64; each rank must call."""
    split = engine.split
    counted = [param for param in params if split.counts(param)]
    # the same format and the same groups on every rank, whichever parameters and shards it has
    wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    dtype = torch.float64 if wide else torch.float32
    with engine.optimizer_view():
        norms = [
            _norm_over(
                [param for param in counted if tuple(split.groups_of(param)) == tuple(groups)],
                engine,
                groups,
                norm_type,
                dtype,
            )
            for groups in split.group_sets
        ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _norm_over(
    params: Sequence[nn.Parameter],
    engine: DataParallelEngine,
    groups: Sequence[Collectives],
    norm_type: float,
    dtype: torch.dtype,
) -> Tensor:
    """The norm over parameters that are split alike, from the shards in the optimizer's view."""
    grads = [_wide(param.grad) for param in params if param.grad is not None]
    over = [*shards_over(groups, engine.groups_of_gradients(), engine.split), *groups]
    if engine.options.same_bits and norm_type != float("inf"):
        if norm_type != 2.0:
            raise ConfigError(
                f"Rank {engine.collectives.rank}: same_bits=True, but a norm of p={norm_type} was "
                f"asked for, expected p=2 or infinity, whose bits do not depend on shards."
            )
        if engine.options.stage == 0:  # each rank has all gradients, and sums up its part of them
            over = [*over, engine.collectives]
            grads = grads[engine.collectives.rank :: engine.collectives.size]
        return exact_norm(grads, over, engine.device).to(dtype)
    local = torch.zeros((), dtype=dtype, device=engine.device)  # torch's, of none, is the host's
    if grads:
        local = nn.utils.get_total_norm(grads, norm_type).to(engine.device, dtype)
    for collectives in over:
        if norm_type == float("inf"):
            collectives.all_reduce(local, "max").wait()
        else:
            total = local**norm_type
            collectives.all_reduce(total, "sum").wait()
            local = total ** (1.0 / norm_type)
    return local


def _wide(tensor: Tensor) -> Tensor:
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if narrow else tensor


# The 2-norm of a gradient that lies in shards, with bits that do not depend on how it is cut.
#
# A sum of floats depends on its order, one of whole numbers does not. So each square is scaled by
# the greatest element's power of two, and cut into two whole numbers:
#
#     (g / 2^e)^2 = high / 2^30 + low / 2^60 + what is left out, at most 2^-60 of the greatest

_LEVEL = 2.0**30  # so many sums of 2^33 elements fit into 63 bits
_BLOCK_NUMEL = {"cpu": 1 << 17}  # stays in the cache; elsewhere fewer launches count for more
_LARGEST_BLOCK_NUMEL = 1 << 22  # whose whole numbers float64 adds up exactly


@torch.no_grad()
def exact_norm(
    grads: Sequence[Tensor], groups: Sequence[Collectives], device: torch.device
) -> Tensor:
    """Return all gradients' norm, shape (), float64, the same bits on any ranks; each must call."""
    greatest = torch.zeros((), dtype=torch.float64, device=device)
    for grad in (one for one in grads if one.numel()):
        lowest, highest = torch.aminmax(grad)
        largest = torch.maximum(-lowest, highest).double()
        greatest = torch.maximum(greatest, largest.nan_to_num(nan=torch.inf))
    for group in groups:
        group.all_reduce(greatest, "max").wait()
    scale = torch.ldexp(torch.ones_like(greatest), -torch.frexp(greatest).exponent)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    block_numel = _BLOCK_NUMEL.get(device.type, _LARGEST_BLOCK_NUMEL)
    for block in (one for grad in grads for one in torch.split(grad.flatten(), block_numel)):
        squares = block.double().mul_(scale * _LEVEL**0.5).square_()
        high = squares.floor()
        low = squares.sub_(high).mul_(_LEVEL).floor_()
        sums += torch.stack([high.sum(), low.sum()]).long()
    for group in groups:
        group.all_reduce(sums, "sum").wait()
    high, low = sums.double().unbind()
    norm = ((high + low / _LEVEL) / _LEVEL).sqrt() / scale
    return torch.where(greatest.isfinite(), norm, greatest)


@having(asker, value=Asker.ENGINE)
@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    max_norm: float,
    engine: DataParallelEngine,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their norm over full parameters is at most `max_norm`.

    Each rank must call, with the same parameters. Where a compressor keeps some of what it sends,
    gradients have been clipped before; the norm is then of what has come.

    Returns:
        Shape (): the norm before clipping.

    Raises:
        RuntimeError: The norm is not finite, and is to be; on every rank, before anything is
            scaled.
    """
    with engine.optimizer_view():
        norm = global_grad_norm(params, engine, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"Rank {engine.collectives.rank}: the norm of the full gradient is {norm.item()}, "
                f"expected a finite one to clip by. Skip the step, or pass "
                f"error_if_nonfinite=False."
            )
        if not engine.clipping.ask(params, max_norm, norm_type):
            nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


@having(asker, value=Asker.ENGINE)
@torch.no_grad()
def clip_grad_value(
    params: Sequence[nn.Parameter], max_value: float, engine: DataParallelEngine
) -> None:
    """Clamp every element of the gradients to [-max_value, max_value]; no communication."""
    with engine.optimizer_view():
        held = [param for param in params if param.grad is not None]
        # torch's refuses a rank without a shard of any of them
        if not engine.clipping.ask(params, max_value, None) and held:
            nn.utils.clip_grad_value_(held, max_value)
