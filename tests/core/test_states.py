"""Words for states, and tables of their changes."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from lightning_shard.core.states import Asker, Checks, State, asker, having, setting, user_asks


class Light(State):
    RED = "GREEN"
    GREEN = "AMBER"
    AMBER = "RED"


class Door(State):
    OPEN = "SHUT"
    AJAR = "SHUT"
    SHUT = "OPEN AJAR"


def test_a_change_that_is_not_allowed_raises() -> None:
    assert Light.RED.to(Light.GREEN) is Light.GREEN
    with pytest.raises(AssertionError, match=r"Light\.RED was changed to Light\.RED"):
        Light.RED.to(Light.RED)


def test_only_debug_runs_and_tests_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checks, "are_on", False)
    assert Light.RED.to(Light.RED) is Light.RED


def test_states_that_the_same_may_follow_are_two() -> None:
    assert list(Door) == [Door.OPEN, Door.AJAR, Door.SHUT]
    assert Door.OPEN is not Door.AJAR


def test_attributes_have_other_values_inside_also_where_that_raises() -> None:
    owner = SimpleNamespace(one=1, other=2)
    with setting(owner, one=3, other=4):
        assert (owner.one, owner.other) == (3, 4)
    with pytest.raises(ValueError, match="inside"), setting(owner, one=3):
        raise ValueError("inside")
    assert vars(owner) == {"one": 1, "other": 2}


def test_an_attribute_that_is_not_there_is_not_set() -> None:
    with pytest.raises(AttributeError, match="another"), setting(SimpleNamespace(), another=1):
        raise NotImplementedError


def test_the_user_asks_unless_a_mark_of_this_thread_says_otherwise() -> None:
    """Threads of the user's, and autograd's of a device, have no marks of the one they are from."""
    assert user_asks()
    with having(asker, Asker.ENGINE), ThreadPoolExecutor() as pool:
        assert not user_asks()
        assert pool.submit(user_asks).result()
        with having(asker, Asker.USER):
            assert user_asks()
        assert not user_asks()
    assert user_asks()
