"""What stops a copy is named where it is held, and iterators are exchanged for such as copy."""

import copy
import dataclasses
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard.environments.launchers._copy import exchange_iterator, name_of, way_of


def _fails(value: Any) -> list[Any]:
    try:
        copy.deepcopy(value)
    except Exception as error:
        return way_of(error)
    raise AssertionError("it was copied")


@dataclasses.dataclass(frozen=True)
class Frozen:
    items: Any


def test_the_name_leads_from_what_is_known_to_the_culprit() -> None:
    with socket.socket() as one:
        model, outer = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1))}), SimpleNamespace()
        model["a"][0].sources = (1, {"x": [one]})
        outer.found = [model]
        way = _fails({"all": outer})
    path = "a.0.sources[1]['x'][0], a socket,"
    assert name_of(way, {id(outer): "trainer"}, "") == f"trainer.found[0].{path}"
    assert name_of(way, {id(outer): "trainer", id(model): "model"}, "") == f"model.{path}"
    assert name_of(way, {}, "what is launched") == "what is launched"


def _numbers() -> Iterator[int]:
    yield from range(4)


@pytest.mark.parametrize(
    "items",
    [_numbers, lambda: map(abs, _numbers()), lambda: iter(DataLoader([0, 1, 2, 3], batch_size=1))],
    ids=["generator", "map", "loader"],
)
@pytest.mark.parametrize("hold", [Frozen, lambda one: [one], lambda one: {"x": one}])
def test_each_copy_goes_through_all_items_from_where_the_iterator_stands(
    items: Any, hold: Any
) -> None:
    """Python copies no generator, nor what is made of one, and torch no iterator of a loader."""
    held = hold(items())
    read = {Frozen: lambda one: one.items, list: lambda one: one[0], dict: lambda one: one["x"]}
    next(read[type(held)](held))
    assert exchange_iterator(_fails(held)) is not None
    others = [copy.deepcopy(held) for _ in range(2)]
    left = [[int(one) for one in read[type(held)](each)] for each in (*others, held)]
    assert left == [[1, 2, 3]] * 3


def test_what_is_no_iterator_or_held_by_a_tuple_stays() -> None:
    with socket.socket() as one:
        assert exchange_iterator(_fails([one])) is None
    assert exchange_iterator(_fails((_numbers(),))) is None
