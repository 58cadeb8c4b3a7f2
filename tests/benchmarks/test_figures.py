"""Turns, ratios, equal losses, bytes by storage, and communication that is hidden, by hand."""

import pytest
import torch

from tests.benchmarks.collectives import OPERATIONS, optimal_bytes
from tests.benchmarks.memory import unique_storage_bytes
from tests.benchmarks.overlap import hidden_share
from tests.benchmarks.timing import LossMismatchError, Ratio, Record, check_losses, turn_order


@pytest.mark.parametrize(
    ("round_index", "order"),
    [(0, "ABC"), (1, "BCA"), (2, "BAC"), (3, "CBA"), (4, "BCA"), (5, "CAB")],
)
def test_turns_rotate_and_change_direction(round_index: int, order: str) -> None:
    assert turn_order("ABC", round_index) == list(order)


def test_ratio_pairs_the_rounds() -> None:
    slow_in_round_1 = [1.0, 9.0, 1.0]
    record = Record(step_seconds=[2.0 * seconds for seconds in slow_in_round_1])
    ratio = Ratio.of(record, Record(step_seconds=slow_in_round_1))
    assert ratio == Ratio(median=2.0, low=2.0, high=2.0)


def test_a_loss_unlike_ddp_s_is_an_error() -> None:
    records = {"ddp": Record(losses=[5.0, 4.0]), "zero2": Record(losses=[5.0, 4.001])}
    with pytest.raises(LossMismatchError, match=r"Step 1 of 'zero2'.*4\.001.*4\.0"):
        check_losses(records)
    with pytest.raises(LossMismatchError):
        check_losses({"ddp": Record(losses=[5.0]), "zero2": Record(losses=[float("nan")])})
    check_losses({"ddp": Record(losses=[5.0]), "local": Record(losses=[4.0])})  # which trains alone


def test_views_and_ties_count_once() -> None:
    flat = torch.zeros(10)
    assert unique_storage_bytes([flat, flat[2:4], flat.view(2, 5)], set()) == 40


def test_what_another_category_has_counted_does_not_count_again() -> None:
    flat = torch.zeros(10)
    seen: set[int] = set()
    assert unique_storage_bytes([flat], seen) == 40
    assert unique_storage_bytes([flat[5:], torch.zeros(1)], seen) == 4


def test_a_freed_storage_counts_nothing() -> None:
    flat = torch.zeros(10)
    flat.untyped_storage().resize_(0)
    assert unique_storage_bytes([flat], set()) == 0


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


def test_theory_is_a_ring_over_all_ranks() -> None:
    assert [optimal_bytes(operation, 64) for operation in OPERATIONS] == [64, 64, 128]
