"""The rule of einsum: positions of the result are those of the first operand that is cut.

    bqhd, bkhd -> bhqk     q of this rank, all keys, which are gathered
    bhqk, bkhd -> bqhd     the same
    bse, ef -> bsf         rows of this rank

Where no position is left in the result, it is computed on gathered tensors.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_shard.context_parallel.operations import gathered_for_part
from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of

_SPARE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Do einsum with this rank's positions."""
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
