"""Samples of products of parameters have each value; tests wait longer on a busy machine."""

import os
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import covering, spread
from tests.patience import patient


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_sample_has_each_value_of_each_parameter(sizes: list[int]) -> None:
    cases = [
        {(str(parameter), str(value)) for parameter, value in enumerate(case)}
        for case in product(*map(range, sizes))
    ]
    chosen = [cases[number] for number in covering(cases, range(len(cases)))]
    assert set().union(*chosen) == set().union(*cases)
    assert len(chosen) <= sum(sizes)


@given(st.text(max_size=5), st.integers(1, 30), st.integers(1, 30))
def test_a_few_cases_are_as_many_as_were_asked_for(name: str, num_cases: int, asked: int) -> None:
    order = spread(name, num_cases, asked)
    assert sorted(order) == list(range(num_cases))
    quick = covering([{("number", str(one))} for one in range(num_cases)], order, asked)
    assert quick == set(order[:asked])
    assert len(quick) == min(num_cases, asked)


@pytest.mark.parametrize("name", ["a test", "another", "one more"])
def test_few_cases_of_a_product_have_different_values(name: str) -> None:
    """As many layouts as the inner parameter has, evenly spread, were of the same layout."""
    cases = [
        {("model", model), ("layout", layout)} for model in "abcde" for layout in ("x", "y", "z")
    ]
    quick = [cases[number] for number in covering(cases, spread(name, 15, 5), 5)]
    assert set().union(*quick) == set().union(*cases)


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 10.0), (2.0, 10.0), (8.0, 40.0)])
def test_what_shares_the_cores_takes_longer(
    load: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert patient(10.0) == seconds


@pytest.mark.timeout(50)
def test_a_busy_machine_does_not_end_tests_that_only_wait_for_their_turn(
    request: pytest.FixtureRequest,
) -> None:
    """The time-out of a test, of starting processes, and of an example of a property."""
    first, second = request.node.iter_markers("timeout")
    assert first.args[0] >= 50
    assert second.args == (50,)
    assert settings.default is not None
    assert settings.default.deadline is None
