"""Rules of the operations that work on parts of a sequence, beside those of any sharded tensor.

(B, S/W, E) @ (E, F)             rows of this rank
(B, H, S/W, D) @ (B, H, D, S)    own queries with all keys, which are gathered first
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, full_tensor
from lightning_shard.tensor_parallel.regions import gather_to_region


def gathered_for_part(value: Any, part: SequencePart) -> Any:
    """Return a full operand for this rank's rows; gradients of all ranks' rows are summed."""
    own = part_of(value)
    if own is None:
        return part.shared(value) if not isinstance(value, DimShardedTensor) else NotImplemented
    if own.num_blocks > 1 or own.group is not part.group:
        return NotImplemented
    return own.without_padding(gather_to_region(own.local, own.dim, own.group), own.dim)


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    part = part_of(input)
    if part is None or part.place == 1 or isinstance(weight, DimShardedTensor):
        return NotImplemented
    return part.widen(func(part.local, part.shared(weight), part.shared(bias)))


def _matmul(func: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Multiply rows of this rank, or matrices of this rank."""
    if kwargs or min(left.ndim, right.ndim) < 2:
        return NotImplemented
    part, others = part_of(left), part_of(right)
    if part is not None and part.place == 2:
        full = gathered_for_part(right, part)
        return full if full is NotImplemented else part.widen(left_of(func, part, full))
    if part is None and others is not None and others.place == 1:
        result = func(others.shared(full_tensor(left)), others.local)
        return others.widen(result, result.ndim - 1)
    like = part or others
    if like is None or like.place <= 2:
        return NotImplemented
    operands = [like.operand(one) for one in (left, right)]
    if any(one is NotImplemented for one in operands):
        return NotImplemented
    result = func(*operands)
    return like.widen(result, result.ndim - like.place)


def _baddbmm(
    func: Any,
    input: Any,  # noqa: A002
    batch1: Any,
    batch2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """Multiply matrices, and add what broadcasts to the product."""
    product = _matmul(torch.bmm, batch1, batch2)
    if product is NotImplemented:
        return NotImplemented
    scaled = product if alpha == 1 else product * alpha
    return scaled if beta == 0 else scaled + (input if beta == 1 else input * beta)


def left_of(func: Any, part: SequencePart, right: Tensor) -> Tensor:
    """Multiply a part's rows with a full matrix; the sharded dimension stays the last but one."""
    result: Tensor = func(part.local, right)
    return result


def _addmm(func: Any, input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Any:  # noqa: A002
    part = part_of(mat1)
    if part is None or part.dim != 0 or input.ndim != 1 or isinstance(mat2, DimShardedTensor):
        return NotImplemented
    return part.widen(func(part.shared(input), part.local, part.shared(mat2), **kwargs))


def _scaled(func: Any, sharded: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an operation of one tensor element by element."""
    part = part_of(sharded)
    return NotImplemented if part is None else part.widen(func(part.local, *args, **kwargs))


_ELEMENTWISE = (
    "elu leaky_relu selu celu softplus mish hardtanh relu6 hardswish hardsigmoid logsigmoid "
    "softsign hardshrink softshrink tanhshrink threshold "
    "cos sin tan acos asin atan cosh sinh acosh asinh atanh log log1p log2 log10 exp2 expm1 "
    "erf erfc erfinv logit sinc sign sgn round floor ceil trunc frac int long bool "
    "logical_not bitwise_not __invert__ isnan isinf isfinite"
)
_COMBINING = (
    "__gt__ __lt__ __ge__ __le__ __eq__ __ne__ gt lt ge le eq ne maximum minimum fmax fmin "
    "logical_and logical_or logical_xor __and__ __or__ __xor__ __rand__ __ror__ "
    "bitwise_and bitwise_or bitwise_xor lerp addcmul addcdiv float_power __rpow__ rsub "
    "remainder fmod __mod__ floor_divide __floordiv__ __rfloordiv__ atan2 hypot xlogy logaddexp "
    "clamp_min clamp_max clip heaviside"
)


def _combined(func: Any, *args: Any, **kwargs: Any) -> Any:
    like = next(one for one in args if isinstance(one, DimShardedTensor))
    part = part_of(like)
    if part is None or any(isinstance(one, Tensor) for one in kwargs.values()):
        return NotImplemented
    operands = [part.operand(one) for one in args]
    if any(one is NotImplemented for one in operands):
        return NotImplemented
    result = func(*operands, **kwargs)
    return part.widen(result, result.ndim - part.place)


RULES.update(
    linear=_linear,
    addmm=_addmm,
    baddbmm=_baddbmm,
    **dict.fromkeys(("matmul", "bmm", "__matmul__"), _matmul),
    **dict.fromkeys(_ELEMENTWISE.split(), _scaled),
    **dict.fromkeys(_COMBINING.split(), _combined),
)
assert torch.addmm.__name__ in RULES
assert functional.linear.__name__ in RULES
