"""Gradients that user code keeps, computes with and sets again train as on one device."""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import WIDTH, trainer_of

pytestmark = ignoring(".*parameters outside of their stage")
Grads = list[Any]
Edit = Callable[[Any, Grads], Any]
NUM_QUICK, NUM_PROGRAMS = 3, 40


def param_grads(module: Any) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def each(change: Callable[[nn.Parameter, Any], Any]) -> Edit:
    """Return an edit of each parameter, given what was kept of its gradient."""

    def edit(module: Any, kept: Grads) -> None:
        for param, grad in zip(module.parameters(), kept, strict=True):
            change(param, grad)

    return edit


def shown(change: Callable[[Any], Any]) -> Edit:
    """Return an edit of each parameter that has a gradient."""
    return each(lambda param, _: None if param.grad is None else change(param))


def kept_of(change: Callable[[Any], Any]) -> Edit:
    """Return an edit of each gradient that was kept."""

    def edit(module: Any, kept: Grads) -> None:
        kept[:] = [None if grad is None else change(grad) for grad in kept]

    return edit


def listed(change: Callable[[Any], Sequence[Any]]) -> Edit:
    """Return an edit of the list of all that was kept."""

    def edit(module: Any, kept: Grads) -> None:
        new = iter(change([grad for grad in kept if grad is not None]))
        kept[:] = [None if grad is None else next(new) for grad in kept]

    return edit


def assign(param: Any, grad: Any) -> None:
    if grad is not None:
        param.grad = grad


def assign_and_halve(param: Any, grad: Any) -> None:
    assign(param, grad)
    if grad is not None:
        param.grad.mul_(torch.tensor(0.5))


def add(param: Any, grad: Any) -> None:
    if grad is not None:
        param.grad = grad if param.grad is None else param.grad + grad


def write(param: Any, grad: Any) -> None:
    if grad is not None and param.grad is not None:
        param.grad.copy_(grad)
    else:
        assign(param, grad)


def none(param: Any) -> None:
    param.grad = None


def scale(param: Any) -> None:
    param.grad = param.grad * torch.tensor(0.8)


KEEP: dict[str, Callable[[Tensor], Any]] = {
    "clone": torch.clone,
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach().clone(),
    "times one": lambda grad: grad * 1.0,
    "of its data": lambda grad: grad.data.clone(),
    "negative": lambda grad: -grad,
}
ZERO: dict[str, Edit] = {
    "zero_grad": lambda module, _: module.optimizers().zero_grad(),
    "to zero": lambda module, _: module.optimizers().zero_grad(set_to_none=False),
    "module": lambda module, _: module.zero_grad(),
    "none": shown(none),
    "by lists": lambda module, _: torch._foreach_zero_(param_grads(module)),
}
COMPUTE: dict[str, Edit] = {
    "number": kept_of(lambda grad: grad * 2.0),
    "tensor": kept_of(lambda grad: grad * torch.tensor(2.0)),
    "plus": kept_of(lambda grad: grad + torch.zeros(())),
    "clamp": kept_of(lambda grad: grad.clamp(torch.tensor(-0.05), torch.tensor(0.05))),
    "norm": kept_of(lambda grad: grad / (grad.norm() + 1.0)),
    "mean": kept_of(lambda grad: grad - grad.mean()),
    "where": kept_of(lambda grad: torch.where(grad > 0, grad, grad * 0.5)),
    "in place": kept_of(lambda grad: grad.mul_(torch.tensor(0.5))),
    "lists": listed(lambda grads: torch._foreach_mul(grads, torch.tensor(0.5))),
    "total": listed(
        lambda grads: [
            grad / (1 + torch.stack([one.norm() for one in grads]).norm()) for grad in grads
        ]
    ),
}
SET: dict[str, Edit] = {
    "assign": each(assign),
    "halve": each(assign_and_halve),
    "add": each(add),
    "write": each(write),
    "clone": each(lambda param, grad: assign(param, None if grad is None else grad.clone())),
}
EDIT: dict[str, Edit] = {
    "scale": shown(scale),
    "in place": shown(lambda param: param.grad.mul_(torch.tensor(0.7))),
    "by norm": shown(lambda param: param.grad.div_(1 + param.grad.norm())),
    "lists": lambda module, _: torch._foreach_mul_(param_grads(module), 0.5),
    "clip": lambda module, _: nn.utils.clip_grad_norm_(module.parameters(), 0.5),
    "one is none": lambda module, _: none(module.head.bias),
    "nothing": lambda module, _: None,
}


def projected(module: Any, kept: Grads, others: Grads) -> None:
    """Take from each gradient its part along another loss's, where both have one (PCGrad)."""
    for index, (one, other) in enumerate(zip(kept, others, strict=True)):
        if one is not None and other is not None and (one * other).sum() < 1:
            kept[index] = one - (one * other).sum() / (other * other).sum().clamp(min=1e-6) * other


class TwoHeads(OfRanks):
    """A loss for each of two heads, a parameter that is one number, and one that nobody uses."""

    program: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.second, self.unused = nn.Linear(WIDTH, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, head: Any = None) -> Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return (head or self.head)(x)

    def kept(self, way: str) -> Grads:
        return [None if p.grad is None else KEEP[way](p.grad) for p in self.parameters()]


class ByHand(TwoHeads):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        draw = Random(self.program)
        optimizer, out = self.optimizers(), self(batch[0])
        optimizer.zero_grad()
        self.manual_backward(out.square().mean(), retain_graph=True)
        kept = self.kept(draw.choice([*KEEP]))
        ZERO[draw.choice([*ZERO])](self, kept)
        others = self(batch[0], self.second).square(), out.abs()
        if draw.random() < 0.7:
            self.manual_backward(draw.choice(others).mean())
        if draw.random() < 0.4:
            projected(self, kept, self.kept("clone"))
        for table in draw.choice([(COMPUTE, SET), (COMPUTE, COMPUTE, SET), (COMPUTE, SET, EDIT)]):
            table[draw.choice([*table])](self, kept)
        optimizer.step()


class InHooks(TwoHeads):
    def loss(self, batch: Any) -> Tensor:
        return self(batch[0]).square().mean()

    def on_after_backward(self) -> None:
        draw = Random(self.program)
        kept = self.kept(draw.choice([*KEEP]))
        for table in (ZERO, COMPUTE, SET, EDIT):
            table[draw.choice([*table])](self, kept)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        draw = Random(-1 - self.program)
        kept = self.kept(draw.choice([*KEEP]))
        for table in (ZERO, COMPUTE, SET) if draw.random() < 0.5 else (EDIT,):
            table[draw.choice([*table])](self, kept)


def trained(style: type[TwoHeads], number: int, scheme: str | None) -> dict[str, Tensor]:
    num_ranks, make = SCHEMES[scheme] if scheme else (1, lambda: "auto")
    torch.manual_seed(0)
    model = type("Drawn", (style,), {"program": number})()
    trainer_of(make(), devices=num_ranks, max_epochs=1, limit_train_batches=3).fit(model)
    return dict(model.state_dict())


alone = cache(lambda style, number: trained(style, number, None))


def programs(schemes: Sequence[str]) -> list[Any]:
    """Return each program with a scheme of its own: the first of each scheme are quick."""
    quick = [(number, scheme) for scheme in schemes for number in range(NUM_QUICK)]
    slow = [(n, scheme) for scheme in schemes for n in range(NUM_QUICK, NUM_PROGRAMS)]
    return [*quick, *(pytest.param(*one, marks=pytest.mark.slow) for one in slow)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("number", "scheme"), programs(["zero1", "zero2", "zero3", "tensor"]))
def test_what_a_step_keeps_of_gradients_and_sets_again_is_trained(number: int, scheme: str) -> None:
    """Biases got no update: to read what was kept looked at `.grad`, saw None and forgot it."""
    got = trained(ByHand, number, scheme)
    torch.testing.assert_close(got, alone(ByHand, number), rtol=1e-5, atol=2e-6)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("number", "scheme"), programs(["zero2", "zero3", "tensor", "pipeline"]))
def test_what_hooks_keep_of_gradients_and_set_again_is_trained(number: int, scheme: str) -> None:
    """In a pipeline ranks disagreed who knew which norms, and gradients set again were lost."""
    got = trained(InHooks, number, scheme)
    torch.testing.assert_close(got, alone(InHooks, number), rtol=1e-5, atol=2e-6)


def test_stages_know_alike_what_is_kept_of_a_gradient_without_a_copy() -> None:
    """A stage without the parameter went on to take what was kept for the gradient's stand-in."""
    got = trained(InHooks, 20, "pipeline")
    torch.testing.assert_close(got, alone(InHooks, 20), rtol=1e-5, atol=2e-6)


class BetweenHooks(TwoHeads):
    """Keeps gradients in one hook, and sets them in another, in which parameters are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.grads: Grads = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def on_after_backward(self) -> None:
        self.grads = self.kept("clone")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param, grad in zip(self.parameters(), self.grads, strict=True):
            param.grad = None if grad is None else grad * 0.5 + grad.sign() * 0.01


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero1", "zero2", "zero3", "tensor", "tensor_zero2", "hybrid"])
def test_what_one_hook_keeps_of_gradients_another_sets(scheme: str) -> None:
    """Under the stages 1 and 2 it was torch's error: the gradient had the size of a full one."""
    got = trained(BetweenHooks, 0, scheme)
    torch.testing.assert_close(got, alone(BetweenHooks, 0), rtol=1e-5, atol=2e-6)
