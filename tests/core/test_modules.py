"""Mixins leave a module's class in any order, and leave other modules of the class alone."""

from functools import cache
from itertools import permutations
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrize

from lightning_shard.core.extensions import give_class_back


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
