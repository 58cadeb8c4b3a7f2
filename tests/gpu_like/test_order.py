"""Which uses of memory are races: by hand, without a device."""

import pytest

from tests.gpu_like.order import Agent, Marks, Order, Span

MEMORY = Span(1, 0, 100)
LEFT, RIGHT = Span(1, 0, 50), Span(1, 50, 100)


@pytest.fixture
def order() -> Order:
    order = Order()
    order.made(1, 100, MAIN, "made")
    return order


MAIN, SIDE = Agent("main"), Agent("side")


@pytest.fixture(autouse=True)
def new_agents() -> None:
    MAIN.clock.clear()
    SIDE.clock.clear()


def follow(follower: Agent, other: Agent) -> None:
    follower.follow({**other.clock})


def test_one_stream_does_one_thing_after_the_other(order: Order) -> None:
    order.launch(MAIN, [], [MEMORY], "write")
    order.launch(MAIN, [MEMORY], [MEMORY], "read and write")
    order.freed(1, "end")
    assert not order.races


def test_another_stream_writes_what_was_only_made_there(order: Order) -> None:
    order.launch(SIDE, [], [MEMORY], "write")
    assert [tuple(race) for race in order.races] == [("main writes: made", "side writes: write")]


def test_who_follows_sees_what_was_done_by_then_and_no_more(order: Order) -> None:
    order.launch(MAIN, [], [LEFT], "before")
    follow(SIDE, MAIN)
    order.launch(MAIN, [], [RIGHT], "after")
    order.launch(SIDE, [LEFT], [], "reads what it has followed")
    assert not order.races
    order.launch(SIDE, [MEMORY], [], "reads all")
    assert [race.first for race in order.races] == ["main writes: after"]


def test_two_read_and_write_other_bytes_at_once(order: Order) -> None:
    follow(SIDE, MAIN)
    order.launch(MAIN, [LEFT], [RIGHT], "main")
    order.launch(SIDE, [LEFT], [], "side")
    assert not order.races
    order.launch(SIDE, [], [LEFT], "side writes what main has read")
    assert len(order.races) == 1


def test_to_follow_one_is_to_follow_those_that_it_has_followed(order: Order) -> None:
    order.launch(MAIN, [], [MEMORY], "write")
    follow(SIDE, MAIN)
    order.launch(SIDE, [], [], "something")
    third = Agent("third")
    follow(third, SIDE)
    order.launch(third, [MEMORY], [MEMORY], "read and write")
    assert not order.races


def test_what_is_launched_comes_after_what_the_host_has_waited_for(order: Order) -> None:
    order.launch(MAIN, [], [MEMORY], "write")
    follow(order.host, MAIN)
    order.launch(SIDE, [MEMORY], [], "read")
    assert not order.races
    order.launch(order.host, [], [MEMORY], "the host writes what is still read")
    assert len(order.races) == 1


def test_memory_is_reused_by_the_stream_on_which_it_was_made(order: Order) -> None:
    follow(SIDE, MAIN)
    order.launch(SIDE, [MEMORY], [], "read")
    order.freed(1, "end")
    assert [race.second for race in order.races] == ["main writes: reuse, freed by end"]


def test_memory_is_kept_for_a_stream_that_uses_it(order: Order) -> None:
    follow(SIDE, MAIN)
    order.launch(SIDE, [MEMORY], [], "read")
    order.keep(1, SIDE)
    order.freed(1, "end")
    assert not order.races


def test_memory_at_an_address_that_was_used_before_is_new(order: Order) -> None:
    follow(SIDE, MAIN)
    order.launch(SIDE, [MEMORY], [], "read")
    follow(MAIN, SIDE)
    order.freed(1, "end")
    order.made(1, 100, MAIN, "made anew")
    order.launch(MAIN, [], [MEMORY], "write")
    assert not order.races


def test_the_hosts_memory_is_no_streams_when_it_ends(order: Order) -> None:
    order.made(2, 8, None, "pinned")
    order.launch(SIDE, [Span(2, 0, 8)], [], "copy")
    order.freed(2, "end")
    assert not order.races
    assert not order.knows(2)


def test_a_collective_is_over_once_its_handle_is_waited_for(order: Order) -> None:
    marks, group = Marks(order, lambda: MAIN), Agent("group")
    marks.begin()
    marks.collective(group, [MEMORY], [MEMORY], "reduce", "tensors")
    handle = marks.end()
    order.launch(MAIN, [MEMORY], [], "too early")
    assert [race.first for race in order.races] == ["group writes: reduce"]
    marks.follow(handle)
    order.races.clear()
    order.launch(MAIN, [MEMORY], [MEMORY], "late enough")
    assert not order.races
    assert handle == []


def test_a_collective_without_a_handle_is_waited_for_at_once(order: Order) -> None:
    marks = Marks(order, lambda: MAIN)
    marks.collective(Agent("group"), [MEMORY], [MEMORY], "reduce", None)
    order.launch(MAIN, [MEMORY], [MEMORY], "read and write")
    assert not order.races


def test_what_is_found_once_is_found_each_time(order: Order) -> None:
    for _ in range(3):
        order.launch(SIDE, [MEMORY], [], "read")
    assert list(order.races.values()) == [3]
