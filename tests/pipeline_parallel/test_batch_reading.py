"""Cutting a batch is collating the samples of its parts, however they are nested; or refused."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import BatchReader, merge_outputs, split_batch

Pair = namedtuple("Pair", ["left", "right"])
Collate = Callable[[list[dict[str, Any]]], Any]


def sample(number: int, rows: int) -> dict[str, Any]:
    """Return a sample of which each value is its own: its boxes have any number of rows."""
    return {
        "x": torch.tensor([float(number), 1.0]),
        "y": number,
        "boxes": torch.full((rows, 4), float(number)),
        "name": str(number),
    }


def values(key: str) -> Collate:
    return lambda samples: [one[key] for one in samples]


FIELDS: dict[str, Collate] = {
    "stacked": lambda samples: torch.stack([one["x"] for one in samples]),
    "boxes": values("boxes"),
    "tuple of boxes": lambda samples: tuple(one["boxes"] for one in samples),
    "names": values("name"),
    "numbers": values("y"),
    "records": lambda samples: [{"boxes": one["boxes"], "label": one["y"]} for one in samples],
    "pairs": lambda samples: [Pair(one["boxes"], one["x"]) for one in samples],
    "tuples": lambda samples: [(one["x"], one["name"]) for one in samples],
    "lists": lambda samples: [[one["boxes"], one["boxes"][:1]] for one in samples],
    "nested": lambda samples: {"deep": (torch.stack([one["x"] for one in samples]), "all")},
}
OUTER: dict[str, Callable[[list[Collate]], Collate]] = {
    "list": lambda made: lambda samples: [one(samples) for one in made],
    "tuple": lambda made: lambda samples: tuple(one(samples) for one in made),
    "mapping": lambda made: lambda samples: {str(i): one(samples) for i, one in enumerate(made)},
    "named": lambda made: lambda samples: Pair(made[0](samples), {"more": made[-1](samples)}),
    "samples": lambda made: lambda samples: list(samples),
    "sequences": lambda made: lambda samples: [one["boxes"] for one in samples],
}


def assert_same(one: Any, other: Any) -> None:
    (ours, form), (theirs, expected) = tree_flatten(one), tree_flatten(other)
    assert form == expected
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@given(
    outer=st.sampled_from(sorted(OUTER)),
    fields=st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3),
    rows=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    num_parts=st.integers(2, 4),
    knows=st.booleans(),
)
def test_parts_of_a_batch_are_its_samples_collated(
    outer: str, fields: list[str], rows: list[int], num_parts: int, knows: bool
) -> None:
    """A list whose first tensors had as many rows as the batch samples went whole to each part."""
    collate = OUTER[outer]([FIELDS[one] for one in fields])
    samples = [sample(number, one) for number, one in enumerate(rows)]
    reader = BatchReader(loader_size=len(samples) if knows else None)
    batch, stop = collate(samples), 0
    is_plain = knows and len(samples) not in (*rows, len(fields), 2)
    try:
        parts = split_batch(batch, min(num_parts, len(samples)), reader)
    except ConfigError as refusal:
        if is_plain and "no tensor" not in str(refusal):
            raise
        return
    for part in parts:
        start, stop = stop, stop + part.size
        assert_same(part.content, collate(samples[start:stop]))
    assert stop == len(samples)


def test_a_list_of_sequences_is_as_long_as_it_is() -> None:
    """A list of sequences was as long as the first."""
    sequences = [torch.full((length, 2), float(length)) for length in (5, 6, 7, 5, 6, 7, 5, 6)]
    parts = split_batch(sequences, 4, BatchReader(loader_size=8))
    assert [[len(one) for one in part.content] for part in parts] == [
        [5, 6],
        [7, 5],
        [6, 7],
        [5, 6],
    ]


def test_earlier_batches_tell_how_the_last_one_is_read() -> None:
    reader = BatchReader(loader_size=8)
    assert reader.num_samples([torch.zeros(5, 2)] * 8) == 8
    assert reader.num_samples([torch.zeros(5, 2)] * 3) == 3
    assert reader.num_samples([torch.zeros(3, 2)] * 1) == 1


def test_a_last_batch_of_samples_is_of_its_samples_whatever_their_rows() -> None:
    """Three samples of eight rows were taken for the fields of eight samples."""
    reader = BatchReader(loader_size=8)
    samples = [(torch.ones(8), torch.ones(8), torch.tensor(0)) for _ in range(8)]
    assert reader.num_samples(samples) == 8
    assert reader.num_samples(samples[:3]) == 3


@pytest.mark.parametrize("lists", ["samples", "fields"])
def test_what_can_be_read_in_two_ways_is_refused_until_an_option_decides(lists: Any) -> None:
    views = [torch.zeros(4, 2), torch.ones(4, 2)]
    with pytest.raises(ConfigError, match=r"list of 2 values .*\(2 or 4 samples\).*batch_lists="):
        split_batch(views, 2)
    assert BatchReader(lists).num_samples(views) == (2 if lists == "samples" else 4)
    square = {"x": torch.zeros(2, 3), "each": [torch.zeros(2, 2), torch.ones(2, 2)]}
    with pytest.raises(ConfigError, match=r"list of 2 values .*batch_lists="):
        split_batch(square, 2)
    (first, _) = split_batch(square, 2, BatchReader(lists))
    assert len(first.content["each"]) == (1 if lists == "samples" else 2)


def test_rows_that_an_index_gives_to_samples_are_refused() -> None:
    """Nodes were cut into microbatches, their labels were not: a loss 38 % off."""
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    graphs = {"nodes": torch.zeros(10, 4), "graph": index, "labels": torch.zeros(4)}
    for reader in (BatchReader(), BatchReader(loader_size=4)):
        with pytest.raises(ConfigError, match="an index of 10 rows into 4 samples"):
            split_batch(graphs, 2, reader)
    assert len(split_batch({"x": torch.zeros(4, 2), "rank": torch.arange(4)}, 2)) == 2


def test_one_value_for_each_sample_is_concatenated_whatever_its_rows() -> None:
    """Boxes that a step returned for its samples were averaged, where one had as many rows."""
    outputs = [[torch.zeros(2, 4), torch.zeros(3, 4)], [torch.ones(1, 4), torch.ones(2, 4)]]
    assert [len(one) for one in merge_outputs(outputs, [2, 2])] == [2, 3, 1, 2]
