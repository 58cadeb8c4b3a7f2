"""Batches are cut sample by sample, and outputs come together as of one step."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import batch_size_of, merge_outputs, split_batch

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def contents(batch: Any, num_microbatches: int) -> list[Any]:
    return [one.content for one in split_batch(batch, num_microbatches)]


@pytest.mark.parametrize(
    ("size", "num_microbatches", "sizes"),
    [
        (10, 4, [3, 3, 2, 2]),
        (8, 4, [2, 2, 2, 2]),
        (4, 4, [1, 1, 1, 1]),
        (5, 1, [5]),
        (7, 2, [4, 3]),
    ],
)
def test_the_first_microbatches_are_the_larger_ones(
    size: int, num_microbatches: int, sizes: list[int]
) -> None:
    parts = split_batch(torch.arange(size), num_microbatches)
    assert [part.size for part in parts] == sizes
    assert [part.index for part in parts] == list(range(num_microbatches))
    assert [part.weight for part in parts] == [one / size for one in sizes]
    assert torch.equal(torch.cat([part.content for part in parts]), torch.arange(size))


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_are_those_of_tensor_split_and_merge_to_the_batch(size: int, count: int) -> None:
    if size < count:
        with pytest.raises(ConfigError, match=f"a batch size of {count}"):
            split_batch(torch.arange(size), count)
        return
    batch = {"x": torch.arange(size * 3.0).view(size, 3), "y": [str(i) for i in range(size)]}
    parts = split_batch(batch, count)
    expected = torch.tensor_split(batch["x"], count)
    assert all(torch.equal(a.content["x"], b) for a, b in zip(parts, expected, strict=True))
    merged = merge_outputs([part.content for part in parts], [part.size for part in parts])
    assert torch.equal(merged["x"], batch["x"])
    assert merged["y"] == batch["y"]


def test_parts_are_views() -> None:
    batch = torch.zeros(4, 2)
    for part in contents(batch, 2):
        part += 1
    assert batch.sum() == 8


def test_what_is_not_of_the_samples_goes_full_into_every_microbatch() -> None:
    weights, scalar, marker = torch.ones(10), torch.tensor(0.5), object()
    full = {"weights": weights, "scalar": scalar, "text": "abcd", "none": None, "n": 4, "o": marker}
    for part in contents({"x": torch.zeros(4, 2), **full, "pair": (1, 2)}, 2):
        assert all(part[name] is value for name, value in full.items())
        assert part["pair"] == (1, 2)
        assert part["x"].shape == (2, 2)


def test_values_of_each_sample_are_split_with_it() -> None:
    x = torch.zeros(3, 2)
    boxes = [{"box": torch.zeros(i + 4, 4)} for i in range(3)]
    names = np.array(["a", "b", "c"])
    first, second = contents((x, ["a", "b", "c"], ("d", "e", "f"), boxes, names), 2)
    assert (first[1], second[1]) == (["a", "b"], ["c"])
    assert (first[2], second[2]) == (("d", "e"), ("f",))
    assert (first[3], second[3]) == (boxes[:2], boxes[2:])
    assert (first[4].tolist(), second[4].tolist()) == (["a", "b"], ["c"])


def test_a_list_of_tensors_is_not_taken_for_samples_when_as_long_as_the_batch() -> None:
    first, _ = contents([torch.zeros(2, 3), torch.ones(2)], 2)
    assert [one.shape for one in first] == [(1, 3), (1,)]


def test_containers_keep_their_type_and_their_other_contents() -> None:
    x = torch.arange(4)
    counted = defaultdict(int, x=x)
    batches = [
        OrderedDict(x=x),
        UserDict(x=x),
        counted,
        Pair(x, "ab"),
        Sample(x, "a"),
        BatchEncoding({"x": x}),
        CausalLMOutput(logits=x),
        {"deep": [Pair({"x": x}, (x,)), None]},
    ]
    for batch in batches:
        parts = contents(batch, 2)
        assert all(type(part) is type(batch) for part in parts)
        assert batch_size_of(batch) == 4
        assert batch_size_of(parts[1]) == 2
    assert counted["x"] is x
    assert contents(counted, 2)[0]["missing"] == 0
    assert contents(Sample(x, "a"), 2)[1].name == "a"
    assert contents(CausalLMOutput(logits=x), 2)[1].logits.tolist() == [2, 3]
    assert contents(batches[-1], 2)[1]["deep"][0].right[0].tolist() == [2, 3]


def test_batches_without_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="got no tensor with a dimension"):
        batch_size_of({"text": ["a", "b"], "scalar": torch.tensor(1.0)})
    with pytest.raises(ConfigError, match="PackedSequence"):
        split_batch({"x": pack_sequence([torch.zeros(2), torch.zeros(1)])}, 2)
    with pytest.raises(ConfigError, match=r"drop_last=True.*num_microbatches=3"):
        split_batch(torch.zeros(3), 4)


def test_scalars_are_averaged_by_size() -> None:
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert merge_outputs(losses, [2, 1]) == 2.0
    assert merge_outputs([1.0, 4.0], [2, 1]) == 2.0
    assert merge_outputs([torch.tensor(1), torch.tensor(2)], [1, 1]) == 1.5
    assert merge_outputs([torch.tensor([1.0, 2.0, 3.0])] * 2, [4, 4]).tolist() == [1.0, 2.0, 3.0]
    half = merge_outputs([torch.tensor(1.0, dtype=torch.bfloat16)] * 3, [1, 1, 1])
    assert half.dtype is torch.bfloat16
    assert merge_outputs([7, 7], [3, 1]) == 7


def test_the_merged_loss_has_the_gradient_of_the_full_one_batch() -> None:
    x = torch.arange(5.0, requires_grad=True)
    parts = x.split([3, 2])
    merge_outputs([(part**2).mean() for part in parts], [3, 2]).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach() / 5)


def test_tensors_of_samples_tokens_and_selections_are_concatenated() -> None:
    assert merge_outputs([torch.zeros(3, 2), torch.zeros(2, 2)], [3, 2]).shape == (5, 2)
    assert merge_outputs([torch.zeros(12, 2), torch.zeros(12, 2)], [3, 3]).shape == (24, 2)
    assert merge_outputs([torch.zeros(7, 2), torch.zeros(1, 2)], [3, 2]).shape == (8, 2)
    arrays = [np.zeros((2, 3)), np.ones((1, 3))]
    assert merge_outputs(arrays, [2, 1]).tolist() == [[0] * 3, [0] * 3, [1] * 3]


def test_samples_along_a_later_dimension_are_concatenated_along_it() -> None:
    """Forecasts of (draws, samples, steps) were averaged: each sample got the mean of several."""
    forecasts = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(merge_outputs([forecasts[:, :2], forecasts[:, 2:]], [2, 2]), forecasts)
    assert torch.equal(merge_outputs([forecasts[:, :3], forecasts[:, 3:]], [3, 1]), forecasts)
    states = torch.arange(8.0).view(1, 4, 2)  # the first of two dimensions that could be
    assert torch.equal(merge_outputs([states[:, :2], states[:, 2:]], [2, 2]), states)


def test_a_tuple_of_fields_as_long_as_a_microbatch_is_merged_field_by_field() -> None:
    """Three fields, of which a tensor is one, were taken for three samples."""
    outputs = [(torch.full((1, 3, 2), float(i)), ["name"] * 3, [i] * 3) for i in range(2)]
    values, names, numbers = merge_outputs(outputs, [3, 3])
    assert values.shape == (1, 6, 2)
    assert names == ["name"] * 6
    assert numbers == [0, 0, 0, 1, 1, 1]


def test_containers_are_merged_value_by_value() -> None:
    outputs = [
        {
            "loss": torch.tensor(float(i)),
            "logits": torch.full((2, 3), float(i)),
            "names": [f"{i}a", f"{i}b"],
            "pair": Pair(torch.zeros(2), "same"),
            "none": None,
            "empty": [],
        }
        for i in range(2)
    ]
    merged = merge_outputs(outputs, [2, 2])
    assert merged["loss"] == 0.5
    assert merged["logits"][:, 0].tolist() == [0, 0, 1, 1]
    assert merged["names"] == ["0a", "0b", "1a", "1b"]
    assert merged["pair"].left.shape == (4,)
    assert merged["pair"].right == "same"
    assert merged["none"] is None
    assert merged["empty"] == []
    hugging = merge_outputs([CausalLMOutput(logits=torch.zeros(2, 3))] * 2, [2, 2])
    assert hugging.logits.shape == (4, 3)
    loss, logits = merge_outputs([(torch.tensor(1.0), torch.zeros(2))] * 2, [2, 2])
    assert loss == 1
    assert logits.shape == (4,)


def test_a_list_longer_than_its_microbatch_is_not_one_value_for_each_sample() -> None:
    assert merge_outputs([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], [2, 2]) == [2.0, 3.0, 4.0]


def test_what_cannot_be_merged_comes_as_a_list_of_the_microbatches() -> None:
    objects = [object(), object()]
    assert merge_outputs(objects, [1, 1]) == objects
    assert merge_outputs(["a", "b"], [2, 2]) == ["a", "b"]
    assert merge_outputs([None, 1], [1, 1]) == [None, 1]
    assert merge_outputs([{"a": 1}, {"b": 1}], [1, 1]) == [{"a": 1}, {"b": 1}]
    lengths = merge_outputs([torch.zeros(2, 3), torch.zeros(2, 4)], [2, 2])
    assert [one.shape for one in lengths] == [(2, 3), (2, 4)]


def test_one_microbatch_is_the_batch_and_its_output_the_output() -> None:
    batch = {"x": torch.zeros(3)}
    (only,) = split_batch(batch, 1)
    assert only.weight == 1
    output = object()
    assert merge_outputs([output], [3]) is output
