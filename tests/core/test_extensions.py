"""Mixins leave a module's class in any order, methods come back, and copies are noticed."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrize

from lightning_shard.core.extensions import (
    ModuleCopies,
    SharedByCopies,
    around,
    extend_class,
    give_class_back,
    instead,
)


class First: ...


class Second: ...


class Third: ...


MIXINS = (First, Second, Third)


@cache
def _made(mixin: type, own: type) -> Any:
    return type(f"{mixin.__name__}{own.__name__}", (mixin, own), {"note": mixin.__name__})


def _extended() -> nn.Module:
    module = nn.Linear(2, 2)
    for mixin in MIXINS:
        module.__class__ = _made(mixin, type(module))
    return module


@pytest.mark.parametrize("order", list(permutations(MIXINS)), ids=lambda one: one[0].__name__)
def test_whoever_leaves_first_takes_no_other_mixin_along(order: tuple[type, ...]) -> None:
    """Whoever left first took another mixin along."""
    one, other = _extended(), _extended()
    for number, mixin in enumerate(order):
        give_class_back(one, (mixin,))
        assert [isinstance(one, left) for left in order] == [at > number for at in range(3)]
        assert all(isinstance(other, kind) for kind in MIXINS)
    assert type(one) is nn.Linear


def test_a_parametrization_of_the_users_stays() -> None:
    module = _extended()
    parametrize.register_parametrization(module, "weight", nn.Identity())
    give_class_back(module, (Third,))
    assert parametrize.is_parametrized(module)
    assert isinstance(module, Second)
    assert not isinstance(module, Third)


def test_modules_that_are_alike_have_one_class_and_get_their_own_back() -> None:
    """Compiled code is shared by modules of one class; `functools.cache` finds it."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (one, other):
        extend_class(module, "First", First, {"note": "first"})
    assert type(one) is type(other)
    assert (type(one).__name__, vars(type(one))["stands_for"]) == ("FirstLinear", "Linear")
    give_class_back(one, (First,))
    assert (type(one), isinstance(other, First)) == (nn.Linear, True)


class Greeter:
    def greet(self, name: str) -> str:
        return f"hello {name}"


def test_a_method_is_replaced_inside_alone_and_a_copy_shares_what_replaces_it() -> None:
    greeter = Greeter()
    with instead(greeter, "greet", lambda own, name: own(name).upper()):
        assert greeter.greet("a") == "HELLO A"
        assert copy.deepcopy(greeter).greet("b") == "HELLO B"
        with instead(greeter, "greet", lambda own, name: own(name) + "!"):
            assert greeter.greet("a") == "HELLO A!"
    assert greeter.greet("a") == "hello a"
    assert not vars(greeter)


def test_a_method_of_the_object_itself_comes_back_also_after_an_error() -> None:
    module = nn.Linear(2, 2)
    own = module.forward = lambda input: input  # type: ignore[assignment, method-assign]  # noqa: A006
    with pytest.raises(ValueError, match="inside"), instead(module, "forward", lambda own: own):
        raise ValueError("inside")
    assert module.forward is own


def test_each_call_runs_in_a_context_of_its_own() -> None:
    greeter, seen = Greeter(), list[str]()

    @contextmanager
    def noting() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("leave")

    with around(greeter, "greet", noting):
        assert [greeter.greet(name) for name in "ab"] == ["hello a", "hello b"]
    assert seen == ["enter", "leave"] * 2


class Place(SharedByCopies): ...


def test_a_copy_shares_what_a_run_has_put_into_a_module() -> None:
    module: Any = nn.Linear(2, 2)
    module.place = Place()
    assert copy.deepcopy(module).place is module.place


def test_copies_and_their_copies_are_noticed_until_the_end() -> None:
    """A pipeline did not notice the copy of a block's copy, which stayed one of its blocks."""
    model, copies, others = nn.Sequential(nn.Linear(2, 2)), ModuleCopies("a"), ModuleCopies("b")
    for one in (copies, others):
        one.watch(model.modules())
    first = copy.deepcopy(model)
    second = copy.deepcopy(first)
    for one in (copies, others):
        assert dict(one.take()) == {first: model, second: model} | {
            made[0]: model[0] for made in (first, second)
        }
    assert not copies.take()
    copy.deepcopy(first)  # which is forgotten
    copies.end()
    copy.deepcopy(model)
    assert not copies.take()
    assert pickle.loads(pickle.dumps(model))[0].weight.equal(model[0].weight)
