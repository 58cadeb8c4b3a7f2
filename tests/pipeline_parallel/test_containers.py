"""The checksum by which stages compare what each has computed of a batch."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.pipeline_parallel.containers import (
    digest,
    held_values,
    map_tensors,
    tensors_in,
    with_values,
)

COLUMNS = torch.arange(21).reshape(3, 7)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_a_column_of_one_sample_has_a_checksum(rows: int, dtype: torch.dtype) -> None:
    """One element keeps its stride, which ended the step of a microbatch of one sample."""
    column = COLUMNS.to(dtype)[:rows, 3]
    assert digest([column]) == digest([column.clone(memory_format=torch.contiguous_format)])
    assert digest([column]) != digest([column + 1])


A, B, C = (torch.full((1,), float(value)) for value in range(3))
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Held:
    """What a model may return."""

    one: Tensor
    other: Any = None


@pytest.mark.parametrize(
    ("value", "tensors"),
    [
        (A, [A]),
        ((A, [B, (C,)]), [A, B, C]),
        ({"b": B, "a": [A, None]}, [B, A]),
        (OrderedDict(b=B, a=(A, 1)), [B, A]),
        (Pair([A], {"c": C}), [A, C]),
        (Held(C, [A]), [C, A]),
        ([Held(A), Pair(B, "text"), 1.5, True], [A, B]),
        ([A, A], [A, A]),
        ("text", []),
        (object(), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_is_found_in_order(value: Any, tensors: list[Tensor]) -> None:
    found = tensors_in(value)
    assert list(map(id, found)) == list(map(id, tensors))
    seen: list[Tensor] = []
    map_tensors(value, lambda tensor: seen.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert list(map(id, seen)) == list(map(id, found))


def test_a_parameter_is_a_tensor() -> None:
    param = torch.nn.Parameter(A)
    assert tensors_in({"weight": param})[0] is param


class Sized(UserDict[str, Any]):
    """Refuses what does not begin with its batch size, as a TensorDict does."""

    def __init__(self, values: dict[str, Any], batch_size: torch.Size) -> None:
        self.batch_size = batch_size
        super().__init__(values)

    def __setitem__(self, key: str, value: Any) -> None:
        assert value.shape[: len(self.batch_size)] == torch.Size(self.batch_size)
        super().__setitem__(key, value)


def test_a_mapping_with_a_batch_size_is_cut_into_smaller_ones() -> None:
    """Half of a TensorDict was set into a copy of the whole, which refused it."""
    batch = Sized({"x": COLUMNS, "y": COLUMNS[:, 0]}, batch_size=torch.Size([3]))
    values = held_values(batch)
    assert values is not None
    half = with_values(batch, {key: value[:2] for key, value in values.items()})
    assert (half.batch_size, batch.batch_size) == (torch.Size([2]), torch.Size([3]))
    assert torch.equal(half["x"], COLUMNS[:2])
    empty = Sized({}, batch_size=torch.Size([3]))
    assert with_values(empty, {}).batch_size == torch.Size([3])
