"""The counters and the ring model."""

import pytest

from lightning_shard.backends.traffic import OperationTraffic, Traffic, ring_share


@pytest.mark.parametrize(
    ("numel", "size", "expected"),
    [
        (12, 1, 0),
        (12, 2, 6),
        (12, 4, 9),
        (0, 4, 0),
        (1, 2, 1),  # half an element is one
        (2, 4, 2),
    ],
)
def test_ring_share(numel: int, size: int, expected: int) -> None:
    assert ring_share(numel, size) == expected


def test_an_unused_operation_counts_zero() -> None:
    traffic = Traffic()
    assert traffic["all_reduce"] == OperationTraffic()
    assert traffic.snapshot() == {}
    assert "all_reduce" not in traffic
    assert traffic.total_bytes == 0


def test_calls_add_up() -> None:
    traffic = Traffic()
    traffic.count("all_reduce", 10, 4)
    traffic.count("all_reduce", 1, 2)
    traffic.spend("all_reduce", 0.5)
    traffic.spend("all_reduce", 0.25, waited=0.25)
    traffic.count("broadcast", 3, 8)
    assert traffic["all_reduce"] == OperationTraffic(
        calls=2, elements=11, bytes=42, seconds=0.75, seconds_waited=0.25
    )
    assert (traffic.total_elements, traffic.total_bytes) == (14, 66)
    assert list(traffic) == ["all_reduce", "broadcast"]
    assert len(traffic) == 2


def test_a_snapshot_stays_and_reset_clears() -> None:
    traffic = Traffic()
    traffic.count("send", 1, 4)
    before = traffic.snapshot()
    traffic.reset()
    assert before["send"].calls == 1
    assert traffic["send"].calls == 0
