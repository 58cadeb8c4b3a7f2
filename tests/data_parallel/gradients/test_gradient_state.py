"""The states of a buffer's gradients, event by event, as the picture of `gradient_state` says."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.data_parallel.gradients.gradient_state import GradientStates

# by event and state, the state after it; all other states stay
CHANGES: dict[str, dict[str, str]] = {
    "arrive": {"NONE": "LOCAL", "REDUCED": "BOTH"},
    "leave": {"LOCAL": "NONE", "BOTH": "REDUCED"},
    "come": {"NONE": "REDUCED", "LOCAL": "BOTH"},
    "show": {"NONE": "REDUCED", "LOCAL": "BOTH"},
    "forget": {"LOCAL": "NONE", "REDUCED": "NONE", "BOTH": "NONE"},
}
EVENTS: dict[str, list[Callable[[GradientStates], None]]] = {
    "arrive": [lambda states: states.arrive(0), lambda states: states.all_arrive([0])],
    "leave": [lambda states: states.leave(0), GradientStates.all_leave],
    "come": [GradientStates.all_come],
    "show": [lambda states: states.show(0)],
    "forget": [lambda states: states.forget([0])],
}


def state_of(states: GradientStates) -> str:
    words = {(0, 0): "NONE", (1, 0): "LOCAL", (0, 1): "REDUCED", (1, 1): "BOTH"}
    return words[states.is_local[0], states.is_reduced[0]]


@given(st.lists(st.sampled_from([*EVENTS])))
def test_events_change_states_as_the_picture_shows(events: list[str]) -> None:
    states = GradientStates(1)
    for event in events:
        before = state_of(states)
        for change in EVENTS[event]:
            change(states)
        assert state_of(states) == CHANGES[event].get(before, before)


@pytest.mark.parametrize("event", EVENTS)
def test_what_is_forgotten_is_none_again(event: str) -> None:
    states = GradientStates(1)
    for change in EVENTS[event]:
        change(states)
    states.forget([0])
    assert states.is_none(0)
