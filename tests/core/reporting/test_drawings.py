"""Axes and joined steps of drawings."""

import pytest

from lightning_shard.core.reporting.drawings import (
    _joined,
    _round_values,
    _thinned,
    rate,
    seconds_of,
)
from lightning_shard.core.reporting.output import format_bytes


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (1.23, 1.31, [1.24, 1.26, 1.28, 1.3]),
        (-3.0, 4.0, [-2, 0, 2, 4]),
        (0, 99_000, [0, 20_000, 40_000, 60_000, 80_000]),
    ],
)
def test_levels_are_round_values_within_the_frame(
    low: float, high: float, values: list[float]
) -> None:
    assert _round_values(low, high) == pytest.approx(values)


def test_points_that_cannot_be_told_apart_are_their_median() -> None:
    points = [(float(n), float(n % 2)) for n in range(1, 1201)]
    thin = _thinned(points)
    assert len(thin) == 400
    assert thin[0] == (3.0, 1.0)
    assert thin[-1][0] == 1200.0
    assert _thinned(points[:400]) == points[:400]


def test_neighbouring_steps_are_joined_to_their_means() -> None:
    steps = {n: {"compute": float(n), "waiting dp": 1.0} for n in range(1, 201)}
    joined = _joined(steps)
    assert len(joined) == 100
    assert joined[0] == ("1 to 2", {"compute": 1.5, "waiting dp": 1.0})
    assert _joined({7: {"compute": 2.0}}) == [("7", {"compute": 2.0})]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (2.5e-7, "0.25 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (4000.0, "4,000 s")],
)
def test_seconds_are_in_the_largest_unit(seconds: float, text: str) -> None:
    assert seconds_of(seconds) == text


def test_rates_have_prefixes_and_sizes_units() -> None:
    assert rate(13_700.0) == "13.7 k"
    assert rate(989e12, "FLOP/s") == "989 TFLOP/s"
    assert rate(12.0) == "12"
    assert format_bytes(1536.4) == "1.50 KiB"
