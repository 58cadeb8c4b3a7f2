"""What a module's functions refer to in its copies."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.launchers.bound_functions import bind_to_copies


class Holder(nn.Module):
    """Holds functions that refer to it in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.inner = nn.Linear(1, 1)
        self.seen: list[float] = []
        self.closure = lambda x: x * self.scale
        self.nested = lambda x: self.closure(x) + partial(Holder.scaled, self)(x)
        self.part = partial(self.scaled)
        self.part_of_closure = partial(self.closure)
        self.method = self.scaled
        self.compiled = torch.compile(self.scaled, backend="eager")
        self.table = {"a": [lambda x: x * self.scale]}
        self.inner.register_forward_hook(lambda module, args, output: self.note(output))
        self.relu = torch.relu

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def note(self, output: Tensor) -> None:
        self.seen.append(output.item())


def copied(module: nn.Module) -> Any:
    memo: dict[int, Any] = {}
    result = copy.deepcopy(module, memo)
    bind_to_copies(module, memo)
    return result


def test_functions_of_a_copy_computed_with_the_original() -> None:
    original = Holder()
    other = copied(original)
    with torch.no_grad():
        other.scale.fill_(3.0)
    one = torch.ones(1)
    for name in ("closure", "part", "part_of_closure", "method", "compiled"):
        assert getattr(other, name)(one) == 3, name
        assert getattr(original, name)(one) == 1, name
    assert other.nested(one) == 6
    assert other.table["a"][0](one) == 3
    assert original.table["a"][0](one) == 1
    assert other.relu is original.relu


def test_a_hook_of_a_copy_filled_the_originals_list() -> None:
    original = Holder()
    other = copied(original)
    other.inner(torch.ones(1))
    assert len(other.seen) == 1
    assert original.seen == []


# torch 2.13 looks at the inputs of what it compiles
@pytest.mark.filterwarnings(r"ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_copy_of_a_compiled_block_was_not_compiled() -> None:
    original = Holder()
    original.inner.compile(backend="eager")
    other = copied(original)
    assert other.inner._compiled_call_impl is not None
    assert other.inner._compiled_call_impl is not original.inner._compiled_call_impl
    with torch.no_grad():
        other.inner.weight.zero_()
        other.inner.bias.fill_(5.0)
    assert other.inner(torch.ones(1)) == 5


def test_closures_of_a_copy_share_their_variables() -> None:
    module = nn.Linear(1, 1)
    owner: Any = module

    def change(other: Any) -> None:
        nonlocal owner
        owner = other

    module.read, module.change = lambda: owner, change  # type: ignore[assignment]
    other = copied(module)
    assert other.read() is other
    other.change(None)
    assert other.read() is None
    assert module.read() is module
