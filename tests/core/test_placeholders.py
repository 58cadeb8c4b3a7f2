"""Stand-ins for the values of other stages: their looks spread, their elements cannot be had."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_shard import ConfigError
from lightning_shard.core.placeholders import Placeholder, is_placeholder


def stand_in(*shape: int, dtype: torch.dtype = torch.float32) -> Placeholder:
    return Placeholder.of(torch.empty(0, dtype=dtype), shape, "embed.weight")


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_whole_of_a_parameters_part_is_as_trainable(is_trained: bool) -> None:
    """A penalty over `if p.requires_grad` left out split layers of other stages."""
    param = nn.Parameter(torch.empty(0), requires_grad=is_trained)
    part = Placeholder.of(param, (2, 4), "up.weight")
    assert Placeholder.of(part, (4, 4), "up.weight").requires_grad is is_trained


@pytest.mark.parametrize(
    ("compute", "shape", "dtype"),
    [
        (lambda x: x + torch.ones(3, 1), (3, 4), torch.float32),
        (lambda x: torch.ones(2, 3) @ x, (2, 4), torch.float32),
        (lambda x: x.half().T.reshape(2, -1), (2, 6), torch.float16),
        (lambda x: nn.LayerNorm(4)(x), (3, 4), torch.float32),
        (lambda x: nn.functional.embedding(torch.tensor([[0, 2]]), x), (1, 2, 4), torch.float32),
        (lambda x: torch.cat([torch.zeros(1, 4), x]), (4, 4), torch.float32),
        (lambda x: x.new_zeros(5).to("cpu") + x.sum(), (5,), torch.float32),
        (lambda x: x.argmax(1), (3,), torch.int64),
        (lambda x: nn.functional.dropout(x, 0.5), (3, 4), torch.float32),
        (lambda x: x.chunk(2, 1)[1].contiguous(), (3, 2), torch.float32),
    ],
)
def test_what_is_computed_from_one_is_one(compute: object, shape: object, dtype: object) -> None:
    result = compute(stand_in(3, 4))  # type: ignore[operator]
    assert is_placeholder(result)
    assert (tuple(result.shape), result.dtype, result.device.type) == (shape, dtype, "cpu")
    assert result.origin == "embed.weight"


def test_in_place_operations_keep_the_stand_in() -> None:
    x = stand_in(2, 2)
    assert x.add_(1) is x
    x[0] = 3.0
    assert is_placeholder(x)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.nonzero(),
        lambda x: torch.ones(3, 4)[x > 0],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
    ],
)
def test_elements_cannot_be_had(ask: object) -> None:
    with pytest.raises((ConfigError, RuntimeError, TypeError)):
        ask(stand_in(3, 4))  # type: ignore[operator]


@pytest.mark.parametrize(
    "write",
    [
        lambda known, x: known.copy_(x),
        lambda known, x: known.add_(x),
        lambda known, x: torch.add(x, 1, out=known),
        lambda known, x: known.__setitem__(0, x[0]),
    ],
)
def test_unknown_elements_are_refused_in_a_known_tensor(write: object) -> None:
    """It then looked known: garbage would have been computed with."""
    known: Tensor = torch.zeros(3, 4)
    with pytest.raises((ConfigError, RuntimeError)):
        write(known, stand_in(3, 4))  # type: ignore[operator]
    assert torch.equal(known, torch.zeros(3, 4))


def test_another_one_of_the_same_looks_is_another_value() -> None:
    x = stand_in(3, 4)
    assert x.again() is not x
    assert x.again().shape == x.shape
    assert "embed.weight" in repr(x)


def test_an_operation_of_the_cpu_is_not_refused_for_a_gpu() -> None:
    """Meta's `histc` raises for CUDA, which knows no fixed order; the CPU does."""
    torch.use_deterministic_algorithms(mode=True)
    assert torch.histc(stand_in(5), bins=3).shape == (3,)
    assert torch.are_deterministic_algorithms_enabled()


GIVEN = [  # in turns, what differs from the one before in a single thing
    (torch.add, (1,), torch.int64),
    (torch.add, (1.0,), torch.int64),
    (torch.add, (True,), torch.int64),
    (torch.sum, (0,), torch.float32),
    (torch.sum, (1,), torch.float32),
    (torch.sum, ((0, 1),), torch.float32),
    (torch.true_divide, (2,), torch.int64),
    (torch.true_divide, (2,), torch.float16),
    (torch.max, (0,), torch.float32),
    (torch.max, (0, True), torch.float32),
]


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize(("func", "others", "dtype"), GIVEN)
def test_an_operation_has_the_format_that_torch_gives_it_each_time(
    func: Any, others: Any, dtype: torch.dtype, default: torch.dtype
) -> None:
    """What an operation makes is known from the last time it was given tensors of such formats."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for shape in ((2, 3), (2, 3), (3, 2)):
            value = torch.ones(shape, dtype=dtype)
            expected = func(value, *others)
            found = func(Placeholder.of(value, shape, "weight"), *others)
            for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
                assert (one.shape, one.stride()) == (other.shape, other.stride())
                assert one.dtype == other.dtype
    finally:
        torch.set_default_dtype(before)
