"""Which calls of blocks are one passage, and when backwards enter and leave them."""

import gc
from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.units.unit import Passage, Passages


class Noted(Passages):
    """Passages that write down the events of a backward, with the number of open ones after it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.on_entry, self.on_exit = self._enter, self._leave

    def _enter(self, passage: Passage) -> None:
        self.open_backwards.add(passage)
        self.events.append(("entered", len(self.open_backwards)))

    def _leave(self, passage: Passage) -> None:
        self.close(passage)
        self.events.append(("left", len(self.open_backwards)))


def call(passages: Passages, block: nn.Module, *args: Tensor) -> Tensor:
    passages.begin_call(args, {})
    result: Tensor = block(*args)
    passages.end_call([result] if result.requires_grad else [])
    return result


def blocks(number: int) -> Sequence[nn.Linear]:
    return [nn.Linear(4, 4) for _ in range(number)]


def not_a_leaf() -> Tensor:
    return torch.ones(2, 4, requires_grad=True) * 1


def test_blocks_that_follow_on_one_another_are_one_passage() -> None:
    passages, x = Noted(), not_a_leaf()
    for block in blocks(3):
        x = call(passages, block, x)
    assert len(passages.open_calls) == 1
    x.sum().backward()
    assert passages.events == [("entered", 1)] * 3 + [("left", 0)]
    assert not passages.are_open


def test_what_is_given_something_else_begins_another_passage() -> None:
    passages = Noted()
    first, second, third = blocks(3)
    x = call(passages, first, not_a_leaf())
    y = call(passages, second, x * 1)
    z = call(passages, third, x)  # not what the last one has returned
    assert len(passages.open_calls) == 3
    (y + z).sum().backward()
    assert passages.events[-1] == ("left", 0)
    assert not passages.are_open


def test_an_inner_call_has_a_passage_of_its_own() -> None:
    passages = Noted()
    outer, inner = blocks(2)
    passages.begin_call((start := not_a_leaf(),), {})
    result = call(passages, inner, outer(start))
    passages.end_call([result])
    assert len(passages.open_calls) == 2
    result.sum().backward(retain_graph=True)
    assert not passages.are_open
    passages.events.clear()
    result.sum().backward()  # both are entered again, though neither has an open call
    assert [kind for kind, _ in passages.events] == ["entered", "entered", "left", "left"]
    assert not passages.are_open


def test_a_passage_that_was_left_is_not_gone_on_with() -> None:
    passages = Noted()
    first, second = blocks(2)
    x = call(passages, first, not_a_leaf())
    x.sum().backward(retain_graph=True)
    call(passages, second, x)
    assert len(passages.open_calls) == 1


def test_a_call_that_fails_and_one_without_gradients_leave_others_as_they_are() -> None:
    passages = Noted()
    first, second = blocks(2)
    passages.begin_call((not_a_leaf(),), {})  # its forward raises
    x = call(passages, first, not_a_leaf())
    with torch.no_grad():
        call(passages, second, x)
    call(passages, second, x).sum().backward()
    assert passages.events[-1] == ("left", 0)
    assert len(passages.open_calls) == 1
    passages.forget()
    assert not passages.are_open


def test_a_graph_without_backward_is_freed_with_its_last_reference() -> None:
    """A graph without backward was kept until garbage was collected."""
    passages, x, weights = Noted(), not_a_leaf(), list[ReferenceType[Tensor]]()
    gc.disable()
    try:
        for block in blocks(3):
            x = call(passages, block, x)
            weights.append(ref(block.weight))  # which a graph keeps
        del x, block
        passages.forget()
        assert [one() for one in weights] == [None] * 3
    finally:
        gc.enable()
