"""The share of communication that is hidden, by hand."""

import pytest

from tests.benchmarks.overlap import hidden_share


@pytest.mark.parametrize(
    ("communication", "computing", "share"),
    [
        ([], [(0, 1)], 0.0),
        ([(0, 4)], [], 0.0),
        ([(0, 4)], [(0, 4)], 1.0),
        ([(0, 4)], [(3, 9)], 0.25),
        ([(0, 4)], [(0, 1), (0, 2), (1, 2)], 0.5),  # kernels beside each other count once
        ([(0, 2), (10, 12)], [(1, 11)], 0.5),
    ],
)
def test_hidden_share(
    communication: list[tuple[float, float]], computing: list[tuple[float, float]], share: float
) -> None:
    assert hidden_share(communication, computing) == share
