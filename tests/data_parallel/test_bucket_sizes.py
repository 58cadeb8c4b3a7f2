"""Which size of buckets suits a link: a function of what was measured and of the model's size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.data_parallel.bucket_sizes import (
    FIXED_SHARE,
    HOST_SECONDS,
    LADDER,
    LEAST_BUCKETS,
    LinkFigures,
    default_mb,
    size_for,
)

LARGE = 10_000.0  # MB of a model that bounds nothing
SECONDS = st.floats(1e-7, 100.0)
SIZES = st.floats(0.0, 1e6)


def link(fixed_ms: float, ms_per_mb: float) -> LinkFigures:
    return LinkFigures(fixed_seconds=fixed_ms / 1e3, seconds_per_mb=ms_per_mb / 1e3)


@pytest.mark.parametrize(
    ("what", "fixed_ms", "ms_per_mb", "model_mb", "expected"),
    [
        ("1 Mbit/s", 40.0, 8000.0, LARGE, 1),
        ("100 Mbit/s", 0.4, 80.0, LARGE, 1),
        ("100 Mbit/s over a continent", 60.0, 80.0, LARGE, 16),
        ("1 Gbit/s", 0.3, 8.0, LARGE, 2),
        ("10 Gbit/s", 0.2, 0.8, LARGE, 16),
        ("25 Gbit/s", 0.2, 0.32, LARGE, 32),
        ("Gloo on the loopback", 0.3, 1.0, LARGE, 16),
        ("shared memory", 0.17, 0.4, LARGE, 32),
        ("NVLink", 0.05, 0.005, LARGE, 64),
        ("a slow start between fast links", 5.0, 0.1, LARGE, 64),
        ("a slow start, a model of 100 MB", 5.0, 0.1, 100.0, 32),
        ("a slow start, a model of 12 MB", 5.0, 0.1, 12.0, 4),
        ("a slow start, a model of 1 MB", 5.0, 0.1, 1.0, 1),
        ("a slow start, nothing", 5.0, 0.1, 0.0, 1),
        ("1 Gbit/s, a model of 12 MB", 0.3, 8.0, 12.0, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_size_for_a_link(
    what: str, fixed_ms: float, ms_per_mb: float, model_mb: float, expected: int
) -> None:
    assert size_for(link(fixed_ms, ms_per_mb), model_mb) == expected, what


@given(fixed=SECONDS, each=SECONDS, model_mb=SIZES)
def test_it_is_the_smallest_that_is_large_enough_or_the_largest_that_is_allowed(
    fixed: float, each: float, model_mb: float
) -> None:
    size = size_for(LinkFigures(fixed_seconds=fixed, seconds_per_mb=each), model_mb)
    assert size in LADDER
    assert size == LADDER[0] or LEAST_BUCKETS * size <= model_mb
    if size > LADDER[0]:
        assert HOST_SECONDS + fixed > FIXED_SHARE * size / 2 * each
    if size < LADDER[-1] and LEAST_BUCKETS * 2 * size <= model_mb:
        assert HOST_SECONDS + fixed <= FIXED_SHARE * size * each


@given(fixed=SECONDS, each=SECONDS, model_mb=SIZES, factor=st.floats(1.0, 1e3))
def test_slower_starts_faster_links_and_larger_models_join_more(
    fixed: float, each: float, model_mb: float, factor: float
) -> None:
    size = size_for(LinkFigures(fixed_seconds=fixed, seconds_per_mb=each), model_mb)
    slower = LinkFigures(fixed_seconds=fixed * factor, seconds_per_mb=each)
    faster = LinkFigures(fixed_seconds=fixed, seconds_per_mb=each / factor)
    same = LinkFigures(fixed_seconds=fixed, seconds_per_mb=each)
    assert size_for(slower, model_mb) >= size
    assert size_for(faster, model_mb) >= size
    assert size_for(same, model_mb * factor) >= size


def test_figures_and_defaults_in_words() -> None:
    assert str(link(0.12, 2**20 / 1.9e6)) == "0.12 ms, 1.9 GB/s"
    assert str(link(40.0, 2**20 / 5.3e4)) == "40 ms, 53 MB/s"
    assert str(link(40.0, 2**20 / 1.2e2)) == "40 ms, 0.12 MB/s"
    assert [default_mb(stage) for stage in range(4)] == [25.0, 25.0, 25.0, 12.5]
