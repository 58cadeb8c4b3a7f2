"""The order of turns, the ratios, and the check that all contenders train the same thing."""

import pytest

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


def test_ratio_of_a_single_round() -> None:
    assert Ratio.of(Record(step_seconds=[3.0]), Record(step_seconds=[2.0])).median == 1.5


def test_a_loss_unlike_ddp_s_is_an_error() -> None:
    records = {"ddp": Record(losses=[5.0, 4.0]), "zero2": Record(losses=[5.0, 4.001])}
    with pytest.raises(LossMismatchError, match=r"Step 1 of 'zero2'.*4\.001.*4\.0"):
        check_losses(records)


def test_a_loss_that_is_not_a_number_is_an_error() -> None:
    records = {"ddp": Record(losses=[5.0]), "zero2": Record(losses=[float("nan")])}
    with pytest.raises(LossMismatchError):
        check_losses(records)


def test_training_alone_may_have_other_losses() -> None:
    check_losses({"ddp": Record(losses=[5.0]), "local": Record(losses=[4.0])})
