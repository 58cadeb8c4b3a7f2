"""What counts as the same but for rounding."""

import math

import pytest
import torch

from lightning_shard.core.comparing import apart, is_close, largest

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([INF, -INF], [INF, -INF], 0.0),
        ([1.0], [NAN], INF),
        ([NAN], [1.0], INF),
        ([INF], [1.0], INF),
    ],
)
def test_the_largest_difference(got: list[float], expected: list[float], difference: float) -> None:
    found = apart(torch.tensor(got), torch.tensor(expected))
    assert found == difference or (found > 1e38 and difference == INF)


def test_numbers_of_any_kind_are_compared() -> None:
    assert apart(torch.tensor([2**53]), torch.tensor([2**53 - 1])) == 1.0
    assert apart(torch.tensor([True]), torch.tensor([False])) == 1.0
    halves = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    assert apart(halves, torch.ones(2)) == 0.0078125


def test_the_largest_element_is_finite() -> None:
    tensors = [torch.tensor([1.0, -3.0, INF]), torch.tensor([NAN]), torch.tensor([])]
    assert largest(tensors) == 3.0
    assert largest([]) == 0.0


def test_rounding_is_a_share_of_the_largest_element_or_a_least() -> None:
    expected = torch.tensor([100.0, 1e-3])
    assert is_close(torch.tensor([100.0, 2e-3]), expected, 1e-4)  # next to nothing beside 100
    assert not is_close(torch.tensor([100.1, 1e-3]), expected, 1e-4)
    assert is_close(torch.zeros(2), torch.full((2,), 1e-9), 1e-4, 1e-8)
