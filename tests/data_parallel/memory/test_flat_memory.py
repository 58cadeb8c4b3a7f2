"""Who holds the memory of a flat buffer: autograd's graphs may, and give it back by themselves."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.memory.flat_memory import MemoryHolders

HELD = {
    "detached": Tensor.detach,
    "slice": lambda weight: weight[0],
    "array": lambda weight: weight.detach().numpy(),
    "storage": lambda weight: weight.detach().untyped_storage(),
    "dlpack": lambda weight: np.from_dlpack(weight.detach()),
}


class Layer:
    """A linear layer whose weight is one of two views of a flat buffer while it is called."""

    def __init__(self) -> None:
        self.memory = torch.ones(8)
        self.views = [self.memory[:4].view(2, 2), self.memory[4:].view(2, 2)]
        self.weight = nn.Parameter(torch.ones(0))
        self.holders = MemoryHolders(["one", "other"])

    def __call__(self, x: Tensor, times: int = 1, keep: Callable[[Tensor], object] = id) -> Tensor:
        self.weight.data = self.views[1]
        for _ in range(times):
            x = torch.tanh(nn.functional.linear(x, self.weight))
        self.kept = keep(self.weight)
        self.weight.data = torch.ones(0)
        return x

    def are_held(self, ends: Sequence[Tensor] | None = None) -> bool:
        return self.holders.are_there(self.memory, ends)


def batch() -> Tensor:
    return torch.ones(3, 2, requires_grad=True)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_what_a_graph_has_saved_is_not_held(times: int) -> None:
    layer = Layer()
    out = layer(batch(), times)
    assert not layer.are_held([out])
    out = layer(out, times)
    assert not layer.are_held([out]), "the same block again, in the same graph"
    other = layer(batch(), times)
    assert not layer.are_held([other]), "another graph beside the first"
    with torch.no_grad():
        layer(batch())
    assert not layer.are_held(())


@pytest.mark.parametrize("keep", HELD.values(), ids=HELD)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_what_user_code_has_of_the_memory_is_held_until_it_is_let_go(
    keep: Callable[[Tensor], object], *, with_gradients: bool
) -> None:
    layer = Layer()
    for _ in range(3):
        with torch.set_grad_enabled(with_gradients):
            out = layer(batch(), keep=keep)
        assert layer.are_held([out] if with_gradients else None)
        assert layer.are_held([out] if with_gradients else None), "asked again"
        del out
        assert layer.are_held()
        layer.kept = None
        assert not layer.are_held()


def test_a_view_beside_two_calls_is_no_third_call() -> None:
    layer = Layer()
    out = layer(batch())
    assert not layer.are_held([out])
    out = layer(out, keep=Tensor.detach)
    assert layer.are_held([out])


def test_the_warning_names_the_parameter_once() -> None:
    layer = Layer()
    layer(batch(), keep=Tensor.detach)
    with pytest.warns(UserWarning, match=r"What was made of 'other' in"):
        layer.holders.warn(layer.memory, layer.views)
    layer.holders.warn(layer.memory, layer.views)


def test_nothing_is_said_of_graphs() -> None:
    layer = Layer()
    out = layer(batch())
    assert not layer.are_held([out])
    assert layer.are_held()
    layer.holders.warn(layer.memory, layer.views)
