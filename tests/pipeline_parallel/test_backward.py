"""The two halves of a backward together are the full one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.pipeline_parallel.gradients import (
    full_backward,
    input_backward,
)

Stage = Callable[[list[Tensor], nn.Module], list[Tensor]]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(self.norm(x)))) * self.scale


STAGES: dict[str, Stage] = {
    "residual": lambda inputs, net: [net(inputs[0])],
    "checkpointed": lambda inputs, net: [checkpoint(net, inputs[0], use_reentrant=False)],
    "two outputs": lambda inputs, net: [net(inputs[0]), net.one(inputs[1])],
    "an input passed on": lambda inputs, net: [net(inputs[0]), inputs[1]],
    "an output that the graph has saved": lambda inputs, net: [
        x := net.one(inputs[0]).tanh(),
        net.two(x) + inputs[1],
    ],
    "views": lambda inputs, net: [net(inputs[0].view(3, 4))[:2].T, inputs[1].T],
    "an unused input": lambda inputs, net: [net(inputs[0])],
    "no input used": lambda inputs, net: [net.one(torch.ones(2, 4))],
    "weights twice": lambda inputs, net: [net(net(inputs[0])) + net.one(inputs[1])],
    "without weights": lambda inputs, net: [inputs[0] * 2],
    "a loss": lambda inputs, net: [net(inputs[0]).square().mean()],
}


def run(name: str) -> tuple[list[Tensor], list[Tensor], list[nn.Parameter], list[Tensor] | None]:
    net = Layers()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(2)]
    roots = STAGES[name](inputs, net)
    grads = [torch.randn(root.shape, generator=generator) for root in roots]
    return roots, inputs, list(net.parameters()), None if name == "a loss" else grads


@pytest.mark.parametrize("name", STAGES)
def test_the_halves_are_the_full(name: str) -> None:
    roots, inputs, params, grads = run(name)
    full_inputs, full_params = full_backward(roots, grads, inputs, params)
    roots, inputs, params, grads = run(name)
    kept = torch.ones_like(params[0])
    params[0].grad = kept
    half_inputs, rest = input_backward(roots, grads, inputs, params)
    half_params = rest()
    torch.testing.assert_close(half_inputs, full_inputs)
    for half, full in zip(half_params, full_params, strict=True):
        assert (half is None) == (full is None)
        if full is not None:
            torch.testing.assert_close(half, full)
    assert params[0].grad is kept
    assert all(one.grad is None for one in (*params[1:], *inputs))


def test_nothing_to_do_gives_zeros_for_inputs() -> None:
    x, weight = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    inputs, params = full_backward([], None, [x], [weight])
    assert torch.equal(inputs[0], torch.zeros(2))
    assert list(params) == [None]


class Reformatted:
    """A product whose weight is in bfloat16 while it is computed with, and in float32 between."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 16)
        self.full, self.shards = self.weight.data.bfloat16(), self.weight.data.flatten()
        self.weight.data = self.shards

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            self.weight.data = self.full
            x = (x.bfloat16() @ self.weight).float()
            self.weight.data = self.shards
        return x

    def backward(self, x: Tensor, y: Tensor, *, halves: bool) -> list[Tensor | None]:
        grads, params = [torch.ones_like(y)], [self.weight]
        self.weight.data = self.full
        if halves:
            of_x, rest = input_backward([y], grads, [x], params)
            of_weight = rest()
        else:
            of_x, of_weight = full_backward([y], grads, [x], params, reformatted=True)
        self.weight.data = self.shards
        return [*of_x, *of_weight]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_weight_whose_format_has_changed_since_the_forward(times: int, *, halves: bool) -> None:
    layer = Reformatted()
    inputs = [torch.full((2, 4), number, requires_grad=True) for number in (1.0, 2.0)]
    outputs = [layer.forward(x, times) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        found = layer.backward(x, y, halves=halves)
        alone = layer.full.clone().requires_grad_()
        expected = x
        for _ in range(times):
            expected = (expected.bfloat16() @ alone).float()
        torch.testing.assert_close(found, [*torch.autograd.grad(expected.sum(), [x, alone])])
    assert layer.weight.grad is None


def test_the_rest_of_a_backward_runs_where_its_weights_are_at_hand() -> None:
    roots, inputs, params, grads = run("residual")
    seen: list[Sequence[nn.Parameter] | str] = []

    @contextmanager
    def at_hand(wanted: Sequence[nn.Parameter]) -> Iterator[None]:
        seen.append(wanted)
        yield
        seen.append("over")

    _, rest = input_backward(roots, grads, inputs, params, at_hand)
    assert seen == []
    rest()
    assert seen == [params, "over"]
