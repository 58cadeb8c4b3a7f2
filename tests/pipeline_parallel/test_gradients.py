"""Gradients of microbatches are summed aside, and handed over by one backward of the loss."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.pipeline_parallel.gradients import (
    GradientStash,
    full_backward,
    hooks_set_aside,
)


def stash_of(*params: nn.Parameter, seed: float = 1.0) -> GradientStash:
    return GradientStash(list(params), seed)


def handed_over(stash: GradientStash, factor: float = 1.0) -> dict[nn.Parameter, Tensor]:
    taken: dict[nn.Parameter, Tensor] = {}
    loss = stash.hand_over(torch.tensor(3.0), taken.__setitem__)
    assert loss.item() == 3
    (loss * factor).backward()
    return taken


def test_sums_are_scaled_by_the_gradient_of_the_loss_and_without_the_seed() -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    stash = stash_of(param, other, seed=8.0)
    for _ in range(3):
        stash.add([param, other], [torch.full((2,), 8.0), None])
    taken = handed_over(stash, factor=0.5)
    assert list(taken) == [param]
    assert torch.equal(taken[param], torch.full((2,), 1.5))
    assert param.grad is None


def test_memory_that_autograd_gives_to_two_parameters_is_added_to_once_for_each() -> None:
    """Memory that autograd gave to two parameters was added to twice."""
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    stash = stash_of(one, two)
    shared = torch.ones(2)
    for _ in range(3):
        stash.add([one, two], [shared, shared])
    taken = handed_over(stash)
    assert torch.equal(taken[one], torch.full((2,), 3.0))
    assert torch.equal(taken[two], torch.full((2,), 3.0))
    assert torch.equal(shared, torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_are_added_up_in_the_backward_and_their_memory_is_free(
    dtype: torch.dtype,
) -> None:
    """All gradients of a stage lay there until its backward was over, and were read once more."""
    table = nn.Embedding(64, 256, sparse=True, dtype=dtype)
    large, small = nn.Linear(256, 256, dtype=dtype), nn.Linear(256, 2, dtype=dtype)
    params = [*table.parameters(), *large.parameters(), *small.parameters()]

    def sums(*, takes: bool) -> list[Tensor]:
        stash = stash_of(*params)
        with stash.hooked():
            stash.takes = takes
            for number in range(4):
                x = table(torch.arange(number + 1)) @ large.weight  # used twice
                loss = small(large(x)).float().square().sum()
                _, grads = full_backward([loss], None, [], params)
                assert grads[1] is not None
                assert (grads[1].untyped_storage().nbytes() < 16) == takes
                stash.add(params, grads)
        assert not any(param._backward_hooks for param in params)
        return [stash.own(param) for param in params]

    for found, expected in zip(sums(takes=True), sums(takes=False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_added_up_in_float32(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(1, dtype=dtype))
    stash = stash_of(param)
    for _ in range(1000):
        stash.add([param], [torch.ones(1, dtype=dtype)])
    assert stash.own(param).item() == 1000  # in bfloat16 it would have stopped at 256


def test_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    stash = stash_of(table.weight)
    stash.add([table.weight], torch.autograd.grad(table(torch.tensor([1])).sum(), [table.weight]))
    assert handed_over(stash)[table.weight][1].tolist() == [1, 1]


def test_a_parameter_without_a_gradient_has_zeros_of_its_own() -> None:
    param = nn.Parameter(torch.ones(2))
    stash = stash_of(param)
    assert not stash.holds(param)
    stash.own(param).add_(1)
    assert torch.equal(handed_over(stash)[param], torch.ones(2))


def test_a_loss_cannot_go_backward_twice() -> None:
    param = nn.Parameter(torch.ones(2))
    stash = stash_of(param)
    stash.add([param], [torch.ones(2)])
    loss = stash.hand_over(torch.tensor(1.0), lambda *_: None)
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="sent backward twice"):
        loss.backward()


def test_hooks_rest_while_microbatches_go_backward() -> None:
    param, calls = nn.Parameter(torch.ones(2)), []

    def hook(grad: Tensor) -> Any:
        calls.append(grad)

    param.register_hook(hook)
    with hooks_set_aside([param]):
        torch.autograd.grad(param.sum(), [param])
    assert not calls
    param.sum().backward()
    assert len(calls) == 1
