"""Steps and hooks that compute with weights and their averaged gradients, under every scheme."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.decoders import DECODER_SCHEMES, Decoder, assert_as_alone
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.stacks import fit

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]


def _assigned(param: Any) -> None:
    param.data = param.data - 0.1 * param.grad


def _into(param: Any) -> None:
    torch.sub(param, param.grad, alpha=0.1, out=param.data)


def _with_momentum(param: Any) -> None:
    state = torch.full(param.shape, 0.1, dtype=param.dtype)
    state.mul_(0.9).addcmul_(param.grad, param).add_(param.grad)
    param.sub_(0.1 * state)


def _like_adam(param: Any) -> None:
    square = torch.zeros_like(param).addcmul_(param.grad, param.grad)
    param.addcdiv_(param.grad, square.sqrt().add_(1e-3), value=-0.01)


def _by_norms(param: Any) -> None:
    norm = torch.norm(torch.stack([torch.norm(param.grad), torch.norm(param.grad, p=1)]))
    param.sub_(0.1 * param.grad * torch.norm(param) / (norm + 1))


def _filled(param: Any) -> None:
    rows = torch.zeros((2, *param.shape), dtype=param.dtype)
    rows[1] = param.grad
    param.sub_(0.1 * rows[1])


def _projected(param: Any) -> None:
    along = (param.grad * param).sum() / param.square().sum().add(1e-9)
    param.sub_(0.1 * (param.grad - along * param))


UPDATES: dict[str, Callable[[Any], Any]] = {
    "data": lambda param: param.data.add_(param.grad, alpha=-0.1),
    "subtracted": lambda param: param.sub_(0.1 * param.grad),
    "copied": lambda param: param.copy_(param - 0.1 * param.grad),
    "assigned": _assigned,
    "into": _into,
    "foreach": lambda param: torch._foreach_add_([param], [param.grad], alpha=-0.1),
    "sign": lambda param: param.sub_(0.01 * torch.sign(param.grad)),
    "masked": lambda param: param.sub_(0.1 * param.grad * (param.grad.abs() > 1e-3)),
    "kept": lambda param: param.sub_(0.1 * param.grad.clone()),
    "lerp": lambda param: param.lerp_(param.grad, 0.05),
    "product": lambda param: param.mul_(1 - 0.1 * param.grad),
    "momentum": _with_momentum,
    "adam": _like_adam,
    "projected": _projected,
    "norms": _by_norms,
    "filled": _filled,
}


def _decayed(param: Any) -> None:
    param.grad = param.grad + 0.01 * param


def _where(param: Any) -> None:
    param.grad = torch.where(param.abs() > 0.1, param.grad, torch.zeros_like(param.grad))


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "added": lambda param: param.grad.add_(param, alpha=0.01),
    "set": _decayed,
    "copied": lambda param: param.grad.copy_(param.grad * 0.5 + 0.01 * param),
    "by the data": lambda param: param.grad.data.add_(param.data, alpha=0.01),
    "scaled": lambda param: param.grad.mul_(1 + param.abs()),
    "where": _where,
    "masked": lambda param: param.grad.masked_fill_(param > 0.2, 0.0),
}
SCHEMES = ["shard_ddp", "zero2", "zero3", "tensor", "tensor_zero3", "context"]


class ByHand(Decoder):
    """Updates its weights in the step itself, or changes gradients there."""

    update: Callable[[Any], Any]
    steps: bool

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for param in self.parameters():
                type(self).update(param)
        if self.steps:
            optimizer.step()
        return loss


@pytest.mark.few_cases(10)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", UPDATES)
def test_a_step_updates_weights_by_their_gradients(name: str, scheme: str) -> None:
    """Tensor parallel refused it, or raised torch's own error: only hooks could."""
    own = {"update": staticmethod(UPDATES[name]), "steps": False}
    assert_as_alone(type("Hand", (ByHand,), own), scheme)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_step_changes_gradients_by_the_weights(name: str, scheme: str) -> None:
    """A layer's bias behind a sum, which each rank has, lost what was added to its gradient."""
    own = {"update": staticmethod(GRADIENTS[name]), "steps": True}
    assert_as_alone(type("Hand", (ByHand,), own), scheme)


class Sharpness(ByHand):
    """Moves weights uphill and back, by what it keeps for each parameter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = Decoder.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        before = {param: param.detach().clone() for param in self.parameters()}
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in before]).norm()
            uphill = {param: 0.05 * param.grad / norm for param in self.parameters()}
            for param in self.parameters():
                param.add_(uphill[param])
        optimizer.zero_grad()
        self.manual_backward(Decoder.training_step(self, batch, batch_idx))
        with torch.no_grad():
            for param in self.parameters():
                param.sub_(uphill[param]).lerp_(before[param], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("scheme", ["zero3", "tensor", "tensor_zero3"])
def test_a_step_finds_what_it_keeps_by_parameter_after_a_backward(scheme: str) -> None:
    """A backward by hand made other tensors of tensor parallel's weights, as did `no_grad`."""
    assert_as_alone(Sharpness, scheme)


class InHook(Decoder):
    """Does so in a hook before the update, with or without a graph."""

    update: Callable[[Any], Any]
    graph: bool

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.set_grad_enabled(self.graph):
            for param in self.parameters():
                type(self).update(param)


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("scheme", [*SCHEMES, "pipeline"])
@pytest.mark.parametrize("name", UPDATES)
def test_a_hook_updates_weights_by_their_gradients(name: str, scheme: str) -> None:
    """What wrote to full tensors met this rank's part of the weight, or of the gradient."""
    own = {"update": staticmethod(UPDATES[name]), "graph": False}
    assert_as_alone(type("Hook", (InHook,), own), scheme)


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("scheme", [*SCHEMES, "pipeline"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_hook_changes_gradients_by_the_weights_in_a_graph(name: str, scheme: str) -> None:
    """Without `no_grad`, torch refused to write to views of the buffer of whole gradients."""
    own = {"update": staticmethod(GRADIENTS[name]), "graph": True}
    assert_as_alone(type("Hook", (InHook,), own), scheme)


class Adds(Decoder):
    """Notes how long the graph behind a gradient is."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.head.weight.grad.add_(self.head.weight, alpha=0.01)
        node: Any = self.head.weight.grad.grad_fn
        self.lengths = [*getattr(self, "lengths", []), 0]
        while node is not None:
            self.lengths[-1] += 1
            node = node.next_functions[0][0] if node.next_functions else None


def test_the_graph_behind_a_gradient_ends_with_its_step() -> None:
    num_ranks, make = DECODER_SCHEMES["shard_ddp"]
    lengths = fit(Adds, make(), devices=num_ranks).model.lengths
    assert lengths == fit(Adds).model.lengths
    assert len(set(lengths)) == 1
