"""The states of a buffer's gradients, event by event, and which views and memory it keeps."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.gradient_buffer import (
    GradientBuffer,
    GradientStates,
    KeptViews,
)
from lightning_shard.data_parallel.memory.flat_memory import FlatMemory
from lightning_shard.testing import run_ranks
from tests.data_parallel.one_step import forward_and_backward
from tests.groups import engine_of


class Memory(FlatMemory):
    """Memory that can be set aside, as that of ranks on shared memory, or cannot."""

    def __init__(self, *, can: bool) -> None:
        self.aside: list[Callable[[], None]] = []
        self._can = can

    def set_aside(self, flat: Tensor, let_go: Callable[[], None]) -> bool:
        self.aside += [let_go] if self._can else []
        return self._can

    def take_up(self, flat: Tensor) -> None:
        self.aside.pop()


def shared() -> Tensor:
    return torch.frombuffer(bytearray(24), dtype=torch.float32)


def test_ordinary_memory_goes_and_its_views_stay() -> None:
    kept, flat = KeptViews(Memory(can=False)), torch.arange(6.0)
    views = list(flat.split(2))
    kept.keep(flat, views)
    assert flat.untyped_storage().nbytes() == 0
    assert kept.take() == (flat, views)
    flat.fill_(3.0)
    assert [view.tolist() for view in views] == [[3.0, 3.0]] * 3
    assert kept.take() is None


def test_shared_memory_is_set_aside_and_taken_up() -> None:
    memory, flat = Memory(can=True), shared()
    kept = KeptViews(memory)
    kept.keep(flat, [flat])
    assert len(memory.aside) == 1
    assert kept.take() == (flat, [flat])
    assert memory.aside == []


def test_who_needs_shared_memory_gets_it() -> None:
    memory, flat = Memory(can=True), shared()
    kept = KeptViews(memory)
    kept.keep(flat, [flat])
    memory.aside[0]()
    assert kept.take() is None


def test_memory_that_cannot_be_set_aside_goes_with_its_views() -> None:
    kept, flat = KeptViews(Memory(can=False)), shared()
    kept.keep(flat, [flat])
    assert kept.take() is None


def backward(engine: DataParallelEngine, model: nn.Module, factor: float) -> None:
    forward_and_backward(engine, lambda: model(torch.full((2, 6), factor)).sum())


def memories_of_averages(rank: int) -> tuple[list[int], int]:
    """Return which objects the averages of four backwards were, and the bytes held after them."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    engine = engine_of(model, stage=3, bucket_mb=1e-5)
    buffer: GradientBuffer = engine.gradients[0].buffer  # whose gradients come last
    made: list[int] = []
    for _ in range(4):
        backward(engine, model, 1.0)
        made.append(id(buffer.local_views[0]))
        model.zero_grad()
    buffer.give_up_zeroed()
    kept = buffer._spare_local._kept
    assert kept is not None
    return made, kept[0].untyped_storage().nbytes()


def test_views_of_averages_are_made_once_and_hold_no_memory_between() -> None:
    for made, num_bytes in run_ranks(memories_of_averages, 1):  # no peer reads them a little longer
        assert len(set(made)) == 1
        assert num_bytes == 0


def spares_of_a_dropped_buffer(rank: int) -> list[bool]:
    """Return whether a buffer has views for the next backward, before and after it lets go."""
    model = nn.Linear(6, 2)
    engine = engine_of(model, stage=2)
    backward(engine, model, 1.0)
    buffer: GradientBuffer = engine.gradients[0].buffer
    had_some = buffer._spare._kept is not None
    buffer.drop()
    return [had_some, buffer._spare.take() is not None]


def test_a_buffer_that_lets_go_of_all_keeps_no_views() -> None:
    assert run_ranks(spares_of_a_dropped_buffer, 2) == [[True, False]] * 2


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
