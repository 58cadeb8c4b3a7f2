"""What plain data is: copied whole, compared by content, and put back into what others hold."""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_shard.elastic import hook_values
from lightning_shard.environments.launchers.replicas import put

PLAIN = [
    [1, "a", (2.0, None)],
    {"a": [1], 2: {3}},
    deque([1, 2]),
    Counter("aab"),
    OrderedDict(a=1),
    defaultdict(list, a=[1]),
    torch.arange(6.0).reshape(2, 3),
    torch.zeros(0, 3, dtype=torch.bfloat16),
    torch.tensor(True),
    [torch.tensor(1 + 2j), torch.float16],
    np.arange(4).reshape(2, 2),
    np.float32(0.1),
]


def frozen(value: Any, most: int = 100) -> Any:
    return hook_values._frozen(value, most)


def thawed(value: Any) -> Any:
    found = {"x": None}
    put(found, "x", hook_values._thawed(value))
    return found["x"]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    again = thawed(frozen(value))
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert frozen(again) == frozen(value)


@pytest.mark.parametrize("value", [1, 2.0, None, "text", b"bytes", True])
def test_a_scalar_stays_itself(value: Any) -> None:
    assert frozen(value) is value


@pytest.mark.parametrize(
    "value",
    [
        object(), nn.Linear(1, 1), [nn.Parameter(torch.zeros(1))], [0] * 101, torch.zeros(101),
        np.zeros(101), lambda: 0, [object()],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_and_large_objects_are_left_alone(value: Any) -> None:
    assert frozen(value) is hook_values._Odd


def test_what_is_put_back_changes_what_others_hold() -> None:
    for present, value in (
        ([1], [2, 3]),
        ({"a": 1}, {"b": 2}),
        ({1}, {2}),
        (deque([1]), deque([2])),
    ):
        found = {"x": present}
        put(found, "x", value)
        assert found["x"] is present
        assert present == value
    found = {"x": [1]}
    put(found, "x", None)
    assert found["x"] is None
