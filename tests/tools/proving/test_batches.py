"""Batches of ranks become one device's, and are taken apart."""

from collections import namedtuple

import pytest
import torch

from lightning_shard.errors import ConfigError
from lightning_shard.tools.proving.runs import halves, join_batches, num_repeats, repeated

Pair = namedtuple("Pair", "x y")


def test_tensors_strings_and_common_values() -> None:
    one = {
        "x": torch.ones(2, 3),
        "names": ["a", "b"],
        "kind": "train",
        "pair": Pair(*torch.ones(2, 1)),
    }
    two = {
        "x": torch.zeros(1, 3),
        "names": ["c"],
        "kind": "train",
        "pair": Pair(*torch.zeros(2, 1)),
    }
    joined = join_batches([one, two])
    assert joined["x"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert joined["names"] == ["a", "b", "c"]
    assert joined["kind"] == "train"
    assert isinstance(joined["pair"], Pair)
    assert joined["pair"].y.tolist() == [1.0, 0.0]


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"\(1, 2\), \(1, 3\)"):
        join_batches([torch.ones(1, 2), torch.ones(1, 3)])


@pytest.mark.parametrize("values", [(1, 2), (torch.tensor(1), torch.tensor(2))])
def test_values_of_which_nobody_knows_the_whole(values: tuple[object, object]) -> None:
    with pytest.raises(ConfigError, match="differs from rank to rank"):
        join_batches(list(values))


def test_halves() -> None:
    one, two = halves([torch.arange(5), {"y": torch.arange(10).view(5, 2)}, "text"])
    assert one[0].tolist() == [0, 1]
    assert two[1]["y"].tolist() == [[4, 5], [6, 7]]
    assert halves([torch.arange(1)]) == [[torch.arange(1)]]


def test_samples_that_come_twice() -> None:
    numbers = torch.arange(8.0).view(4, 2)
    ours, theirs = [[numbers[0]], [numbers[1]]], [[numbers[2]], [numbers[0]]]
    assert repeated([ours, theirs]) == (0, 1, 1)
    assert repeated([ours, [[numbers[2]], [numbers[3]]]]) is None
    assert num_repeats([*ours, *theirs]) == 2
