"""What microbatches make of a value, merged: a table."""

from typing import Any

import pytest
import torch

from lightning_shard.trainer.step_attributes import Microbatches, merged

SIZES, LOSSES = (4, 4, 2), (1.0, 2.0, 4.0)
MEAN = (4 * 1.0 + 4 * 2.0 + 2 * 4.0) / 10
SUM = 4 * 1.0 + 4 * 2.0 + 2 * 4.0


@pytest.mark.parametrize(
    ("start", "values", "expected", "is_certain"),
    [
        (5, (6, 6, 6), 6, True),  # a counter of steps
        (5, (9, 9, 7), 15, True),  # of samples
        (5, (7, 6, 5), 8, False),  # of right answers
        (None, (3, 3, 3), 3, True),
        (True, (False, False, False), False, True),
        (0.1, (0.05, 0.05, 0.05), 0.05, True),  # a learning rate
        (5.0, (6.0, 7.0, 9.0), 5 + MEAN, True),  # the loss, added
        (0.0, LOSSES, MEAN, True),
        (7.0, LOSSES, MEAN, True),  # the last loss
        (5.0, (9.0, 13.0, 13.0), 5 + SUM, True),  # the loss of all samples
        (5.0, (4.6, 4.7, 4.9), 0.9 * 5 + 0.1 * MEAN, False),  # an average kept by hand
        ("a", ("b", "c", "d"), "d", False),
    ],
)
def test_numbers(start: Any, values: Any, expected: Any, is_certain: bool) -> None:
    found = merged(start, values, Microbatches(SIZES, LOSSES))
    assert found.value == (pytest.approx(expected) if type(expected) is float else expected)
    assert type(found.value) is type(expected)
    assert (found.assumed == "") is is_certain


def test_tensors() -> None:
    parts = Microbatches(SIZES, LOSSES)
    zeros = torch.zeros(2)
    found = merged(zeros, [torch.full((2,), one) for one in LOSSES], parts)
    torch.testing.assert_close(found.value, torch.full((2,), MEAN))
    counts = merged(torch.tensor(3), [torch.tensor(4)] * 3, parts)
    assert counts.value == 4


def test_lists_of_one_length_are_merged_by_items() -> None:
    found = merged([0.0, 1.0], [[1.0, one] for one in LOSSES], Microbatches(SIZES, LOSSES))
    assert found.value == [1.0, pytest.approx(MEAN)]


def test_one_sample_in_each_microbatch_is_ambiguous() -> None:
    found = merged(5, (6, 6, 6), Microbatches((1, 1, 1), LOSSES))
    assert (found.value, found.assumed) == (6, "a count of batches")
