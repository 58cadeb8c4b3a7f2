"""The benchmark of asynchronous SGD."""

from tests.benchmarks.asynchronous import Result, report


def result(*rounds: float, sustained: float = 1.0, max_staleness: int = 0) -> Result:
    return Result(
        rounds=list(rounds), sustained=sustained, max_staleness=max_staleness, gradients=40, waits=3
    )


def test_throughputs_are_medians_and_the_staleness_is_the_largest() -> None:
    undelayed = [result(1.0, 1.0, sustained=8.0), result(1.0, 9.0, sustained=8.0)]
    delayed = [result(2.0, 2.0, sustained=2.0, max_staleness=3), result(2.0, 7.0, sustained=2.0)]
    bound, sustained, staleness = report(undelayed, delayed, bound=4)
    assert bound.startswith("up to the bound of 4: 4.0 steps/s undelayed, 2.0 beside the slow rank")
    assert "rank: 0.50 (goal" in bound
    assert sustained == "sustained: 8.0 steps/s undelayed, 2.0 beside the slow rank"
    assert staleness.startswith("largest staleness observed: 3 in 40 gradients applied")
