"""Boxes cover what they stand for, once."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.core.layout import (
    Box,
    PlacedBox,
    boxes_of_range,
    intersection,
    placed_in,
    whole,
)

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))


@given(shapes, st.data())
def test_a_range_is_covered_once_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    boxes = list(boxes_of_range(start, stop, shape))
    covered = [int(n) for box in boxes for n in numbers[region(box)].flatten()]
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(
    ("start", "stop", "shape", "expected"),
    [
        (3, 17, (4, 5), [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]),
        (0, 20, (4, 5), [((0, 0), (4, 5))]),
        (0, 1, (), [((), ())]),
        (0, 0, (), []),
        (0, 0, (3, 0), []),
        (2, 4, (6,), [((2,), (2,))]),
    ],
)
def test_boxes_of_a_range(
    start: int, stop: int, shape: tuple[int, ...], expected: list[object]
) -> None:
    assert [(b.offsets, b.sizes) for b in boxes_of_range(start, stop, shape)] == expected


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    assert intersection(Box((0, 0), (2, 2)), Box((2, 0), (1, 2))) is None
    assert intersection(Box((0, 0), (2, 2)), Box((1, 1), (5, 5))) == Box((1, 1), (1, 1))


def test_a_box_over_two_blocks_is_placed_in_two() -> None:
    blocks = [PlacedBox(Box((0, 0), (1, 3)), (1, 0)), PlacedBox(Box((1, 0), (1, 3)), (3, 0))]
    assert [one.full for one in placed_in(whole((2, 3)), blocks)] == [
        Box((1, 0), (1, 3)),
        Box((3, 0), (1, 3)),
    ]
