"""What one step of the whole batch would have made of a value, from what its microbatches make.

    each begins with 5     makes 6, 6, 6              6      a counter of steps, a learning rate
    of sizes 4, 4, 2       makes 9, 9, 7             15      a counter of samples
                           5 + its loss, three times  5 + the mean of the losses
                           5 + its loss * its size    5 + their sum
                           other numbers              their mean by size, with a warning

Means stay means and sums of samples stay sums where the loss or the number of samples tells which
is which; an average that is kept by hand (0.9 * old + 0.1 * new) is a mean as well.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Merged(NamedTuple):
    """What a batch has made of a value.

    Attributes:
        value: The value after the batch.
        assumed: What it was taken to be, in words; empty where that is certain.
    """

    value: Any
    assumed: str = ""


class Microbatches(NamedTuple):
    """What is known of the microbatches of one batch.

    Attributes:
        sizes: Number of samples of each.
        losses: Loss of each; None where a step has none.
    """

    sizes: Sequence[int]
    losses: Sequence[float | None]

    @property
    def are_single_samples(self) -> bool:
        """Whether a sum over samples and one over microbatches are the same."""
        return max(self.sizes) == 1


def merged(start: Any, values: Sequence[Any], parts: Microbatches) -> Merged:
    """Merge what microbatches have made of one value, each from the same start.

    Args:
        start: The value before the batch; None where there was none.
        values: The value after each microbatch.
        parts: What is known of the microbatches.
    """
    if len(values) == 1:
        return Merged(values[0])
    if all(map(_is_whole, values)):
        return _merged_whole(start, values, parts)
    if all(_same(one, values[0]) for one in values[1:]):
        return Merged(values[0])
    if all(map(_is_real, values)) and len({_shape(one) for one in values}) == 1:
        return _merged_real(start, values, parts)
    if all(isinstance(one, list) for one in values) and len(set(map(len, values))) == 1:
        items = [merged(None, each, parts) for each in zip(*values, strict=True)]
        assumed = next((one.assumed for one in items if one.assumed), "")
        return Merged([one.value for one in items], assumed)
    return Merged(values[-1], "the value after the last microbatch")


def _merged_whole(start: Any, values: Sequence[Any], parts: Microbatches) -> Merged:
    are_equal = all(_same(one, values[0]) for one in values[1:])
    if not _is_whole(start):
        if are_equal:
            return Merged(values[0])
        return Merged(values[-1], "the value after the last microbatch")
    deltas = [one - start for one in values]
    of_samples = all(
        _same(delta, _like(delta, size)) for delta, size in zip(deltas, parts.sizes, strict=True)
    )
    if of_samples and not parts.are_single_samples:
        return Merged(start + sum(deltas))
    if are_equal:
        return Merged(values[0], "a count of batches" if of_samples else "")
    return Merged(start + sum(deltas), "the sum of what each microbatch adds")


def _merged_real(start: Any, values: Sequence[Any], parts: Microbatches) -> Merged:
    begin = start if _is_real(start) and _shape(start) == _shape(values[0]) else 0.0
    deltas = [one - begin for one in values]
    adds_sums = _follow(
        deltas, [_times(one) for one in zip(parts.losses, parts.sizes, strict=True)]
    )
    if adds_sums and not parts.are_single_samples:
        return Merged(begin + sum(deltas))
    is_certain = not adds_sums and (_follow(deltas, parts.losses) or _follow(values, parts.losses))
    return Merged(_mean(values, parts.sizes), "" if is_certain else "a mean over samples")


def _times(pair: tuple[float | None, int]) -> float | None:
    loss, size = pair
    return None if loss is None else loss * size


def _follow(values: Sequence[Any], losses: Sequence[float | None]) -> bool:
    """Whether each value is its microbatch's loss, up to rounding."""
    return all(
        loss is not None and _shape(one) == () and abs(float(one) - loss) <= 1e-4 * abs(loss) + 1e-8
        for one, loss in zip(values, losses, strict=True)
    )


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the mean weighted by size, added up in float64."""
    total = sum(sizes)
    if not isinstance(values[0], Tensor):
        return sum(one * size for one, size in zip(values, sizes, strict=True)) / total
    wide = sum(one.double() * size for one, size in zip(values, sizes, strict=True))
    assert isinstance(wide, Tensor)
    return (wide / total).to(values[0].dtype)


def _like(value: Any, number: int) -> Any:
    return torch.full_like(value, number) if isinstance(value, Tensor) else number


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _kind(number: type, of_tensor: Callable[[Tensor], bool]) -> Callable[[Any], bool]:
    def is_kind(value: Any) -> bool:
        return of_tensor(value) if isinstance(value, Tensor) else type(value) is number

    return is_kind


_is_real = _kind(float, lambda tensor: tensor.is_floating_point())
_is_whole = _kind(
    int,
    lambda tensor: (
        not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    ),
)
