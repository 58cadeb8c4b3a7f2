"""Gradients that user code makes or edits itself are averaged over the ranks, or refused."""

from functools import cache, partial
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor

from lightning_shard import ConfigError, DDPStrategy
from lightning_shard.data_parallel.content import content, contents
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.styles import Automatic, Net

pytestmark = ignoring(".*AMP with fp16 is not supported on CPU")


class ByHand(Automatic):
    """Of two losses the gradient of one is made by `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x.double())
        self.record(y.square().mean() + y.abs().mean())
        return y.square().mean(), y.abs().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        one, other = self.losses(batch[0])
        grads = torch.autograd.grad(one, list(self.parameters()), retain_graph=True)
        self.step_with(optimizer, grads, other, batch_idx)

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        raise NotImplementedError


class Set(ByHand):
    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()


class SetAndBackward(ByHand):
    """Autograd adds to what was set."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad = grad
        self.manual_backward(other)
        optimizer.step()


class Added(ByHand):
    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other)
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad = param.grad + grad
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


class AddedInPlace(ByHand):
    """Half of it past autograd's version counters, and half of it by a list."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other)
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad.data.add_(grad, alpha=0.5)
        torch._foreach_add_([p.grad for p in self.parameters()], [0.5 * grad for grad in grads])
        optimizer.step()


class SteppedTwice(ByHand):
    """What was averaged for the first step is part of the gradient of the second."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad = 0.5 * param.grad + grad
        optimizer.step()


class OfSome(ByHand):
    """A part has gradients of its own, and the rest those of backward."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other)
        for param, grad in zip(self.net.head.parameters(), grads[-2:], strict=True):
            param.grad = grad
        optimizer.step()


class OfFunctions(ByHand):
    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        def loss(params: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.net, params, (self.x,)).square().mean()

        params = dict(self.net.named_parameters())
        by_name = torch.func.grad(loss)({name: param.detach() for name, param in params.items()})
        for name, param in params.items():
            param.grad = by_name[name]
        optimizer.step()

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.x = x.double()
        return super().losses(x)


class AfterBackward(ByHand):
    """A hook of automatic optimization adds, with accumulation and clipping."""

    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        one, other = self.losses(batch[0])
        self.grads = torch.autograd.grad(one, list(self.parameters()), retain_graph=True)
        return other

    def on_after_backward(self) -> None:
        for param, grad in zip(self.parameters(), self.grads, strict=True):
            param.grad = param.grad + grad


class BeforeOptimizerStep(AfterBackward):
    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param, grad in zip(self.parameters(), self.grads, strict=True):
            param.grad.add_(grad)


ADDING = [Added, AddedInPlace, OfSome, AfterBackward, BeforeOptimizerStep]
SETTING = [Set, SetAndBackward, SteppedTwice, OfFunctions]
Result = tuple[list[float], dict[str, Tensor]]


def trainer_of(**options: Any) -> L.Trainer:
    return quiet_trainer(**{"accumulate_grad_batches": 1, "gradient_clip_val": None} | options)


def train(style: type[ByHand], **options: Any) -> Result:
    torch.manual_seed(7)
    model = style().double()
    trainer_of(max_epochs=2, **style.options, **options).fit(model)
    return model.history, {name: value.clone() for name, value in model.state_dict().items()}


single_device = cache(train)


def check(style: type[ByHand], **options: Any) -> None:
    history, weights = train(style, **options)
    expected_history, expected = single_device(style)
    assert history == pytest.approx(expected_history, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("style", ADDING)
def test_what_is_added_to_grad_is_averaged(style: type[ByHand], strategy: str) -> None:
    """What was added to `.grad` stayed a rank's own."""
    check(style, strategy=f"{strategy}_in_process", devices=3)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("style", SETTING)
def test_what_is_set_in_grad_is_averaged(style: type[ByHand], strategy: str) -> None:
    """What was set in `.grad` stayed a rank's own."""
    check(style, strategy=f"{strategy}_in_process", devices=3)


class OnOneRank(Set):
    """Some ranks have nothing to learn from, or only from a part."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        for number, (param, grad) in enumerate(zip(self.parameters(), grads, strict=True)):
            if self.global_rank == 0 or (self.global_rank == 1 and number % 2):
                param.grad = grad
        optimizer.step()
        own = [param.detach().sum() for param in self.parameters()]
        assert len({float(s) for s in self.all_gather(torch.stack(own).sum())}) == 1


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_gradients_that_some_ranks_have_parted_them(strategy: str) -> None:
    train(OnOneRank, strategy=f"{strategy}_in_process", devices=3)


class Multiplied(ByHand):
    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other)
        for param, grad in zip(self.parameters(), grads, strict=True):
            param.grad.mul_(grad)
        optimizer.step()


def test_a_product_with_a_ranks_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mul_ of the gradient .* differs between the ranks"):
        train(Multiplied, strategy="zero2_in_process", devices=2)


class Kept(ByHand):
    """The gradient of one loss is kept, without a copy, while backward makes the other's."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other, retain_graph=True)
        kept = [param.grad for param in self.parameters()]
        optimizer.zero_grad()
        self.manual_backward(2 * other)
        for param, grad in zip(self.parameters(), kept, strict=True):
            param.grad = param.grad + 0.3 * grad
        optimizer.step()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_a_gradient_that_is_kept_stays(strategy: str) -> None:
    """A gradient that was kept became the next."""
    check(Kept, strategy=f"{strategy}_in_process", devices=2)


class KeptOfOneHead(ByHand):
    """Of two backward passes the second leaves a bias out, whose kept gradient is set again."""

    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other)
        kept = [param.grad.clone() for param in self.parameters()]
        optimizer.zero_grad()
        for param in [*self.parameters()][1:]:
            param.requires_grad_(False)
        self.manual_backward(self.losses(torch.ones(2, 4))[0])
        for param, grad in zip(self.parameters(), kept, strict=True):
            param.requires_grad_(True)
            param.grad = grad if param.grad is None else param.grad + grad
        optimizer.step()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_is_set_where_the_next_backward_brings_nothing_stays(strategy: str) -> None:
    """The parameter was known to have no gradient, and what was set there was not stepped with."""
    check(KeptOfOneHead, strategy=f"{strategy}_in_process", devices=2)


class TwiceThroughOneGraph(ByHand):
    def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
        self.manual_backward(other, retain_graph=True)
        optimizer.zero_grad()
        self.manual_backward(2 * other)
        optimizer.step()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_second_backward_through_one_graph_has_its_gradients(strategy: str) -> None:
    """Under stage 3 the end of a reduction wrote over gradients that had come meanwhile."""
    check(TwiceThroughOneGraph, strategy=f"{strategy}_in_process", devices=2)


def test_equal_edits_send_no_gradients_again() -> None:
    class Edited(ByHand):
        def step_with(self, optimizer: Any, grads: Any, other: Tensor, batch_idx: int) -> None:
            self.manual_backward(other)
            for param in self.parameters():
                param.grad = 2 * param.grad
            ranks = self.trainer.strategy.collectives
            before = ranks.traffic["all_reduce"].elements
            optimizer.step()
            self.sent = ranks.traffic["all_reduce"].elements - before

    model, numel = Edited().double(), sum(param.numel() for param in Net().parameters())
    trainer_of(max_epochs=1, strategy=DDPStrategy(backend="in_process"), devices=2).fit(model)
    assert 0 < model.sent < numel / 4


def test_content_tells_values_and_places_apart() -> None:
    one = torch.zeros(3000)
    one[7] = 1.0
    numbers = [one, one.roll(1), one.roll(1024), -one, one.double(), torch.zeros(3000)]
    assert len({int(content(number)) for number in numbers}) == len(numbers)
    signs = torch.ones(3000, dtype=torch.float64)
    signs[:2] = -1
    assert content(signs) != content(torch.ones(3000, dtype=torch.float64))
    order = partial(contents, device=torch.device("cpu"))
    assert order([one, -one]) != order([-one, one])
