"""Rules of the operations that work on parts of a sequence, beside those of any sharded tensor.

(B, S/W, E) @ (E, F)             rows of this rank
(B, H, S/W, D) @ (B, H, D, S)    own queries with all keys, which are gathered first
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, full_tensor
from lightning_shard.tensor_parallel.full_width_attention import combined
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
        return full if full is NotImplemented else part.widen(func(part.local, full))
    if part is None and others is not None and others.place == 1:
        result = func(others.shared(full_tensor(left)), others.local)
        return others.widen(result, result.ndim - 1)
    like = part or others
    if like is None or like.place <= 2:
        return NotImplemented
    return combined(func, left if part else right, (left, right), {})


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


def _addmm(func: Any, input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Any:  # noqa: A002
    part = part_of(mat1)
    if part is None or part.dim != 0 or input.ndim != 1 or isinstance(mat2, DimShardedTensor):
        return NotImplemented
    return part.widen(func(part.shared(input), part.local, part.shared(mat2), **kwargs))


def _scaled(func: Any, sharded: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an operation of one tensor element by element."""
    part = part_of(sharded)
    return NotImplemented if part is None else part.widen(func(part.local, *args, **kwargs))


_SPARE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Do einsum with this rank's positions.

        bqhd, bkhd -> bhqk     q of this rank, all keys, which are gathered
        bhqk, bkhd -> bqhd     the same
        bse, ef -> bsf         rows of this rank

    Where no position is left in the result, it is computed on gathered tensors.
    """
    tensors = (
        operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    )
    letters = _letters(equation, tensors) if isinstance(equation, str) else None
    if letters is None:
        return NotImplemented
    inputs, output = letters
    parts = [(part_of(one), each) for one, each in zip(tensors, inputs, strict=True)]
    found = ((one, each[one.dim]) for one, each in parts if one is not None)
    like, letter = next(((one, name) for one, name in found if name in output), (None, ""))
    if like is None or like.num_blocks > 1:
        return NotImplemented
    own = [_own(one, each, like, letter) for one, each in zip(tensors, inputs, strict=True)]
    if any(one is NotImplemented for one in own):
        return NotImplemented
    return like.widen(func(",".join(inputs) + "->" + output, *own), output.index(letter))


def _own(tensor: Tensor, letters: str, like: SequencePart, letter: str) -> Any:
    """Return what this rank needs of an operand for its positions along `letter`."""
    part = part_of(tensor)
    if part is None or letters[part.dim] != letter:
        if letter not in letters:
            return gathered_for_part(tensor, like)
        is_plain = part is None and tensor.shape[letters.index(letter)] == like.width
        return like.split(tensor, letters.index(letter)) if is_plain else NotImplemented
    is_alike = (part.group, part.num_blocks, part.padding) == (like.group, 1, like.padding)
    return part.local if is_alike and part.width == like.width else NotImplemented


def _letters(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str] | None:
    """Return the letters of each operand and of the result, those of an ellipsis included."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow or len(inputs) != len(tensors):
        return None
    spare = [one for one in _SPARE if one not in equation]
    most = 0
    for place, (each, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        num_more = tensor.ndim - len(each.replace("...", ""))
        if "..." in each:
            most = max(most, num_more)
            each = inputs[place] = each.replace("...", "".join(spare[:num_more][::-1]))
        if len(each) != tensor.ndim or len(set(each)) < len(each):
            return None
    return inputs, output.replace("...", "".join(spare[:most][::-1]))


RULES["einsum"] = einsum


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
    return combined(func, like, args, kwargs)


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
