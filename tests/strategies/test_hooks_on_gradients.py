"""Hooks on gradients and on activations, and gradients of inputs, where ranks share a model."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_shard import ConfigError
from lightning_shard.data_parallel.torch_private import gradient_hooks
from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import Fitted, fit

pytestmark = ignoring(
    ".*microbatches are fewer than the",
    # torch 2.14's own decompositions for forward derivatives use it
    "`torch.jit.script` is deprecated:FutureWarning",
)
alone: Any = cache(fit)


def fit_under(style: type[OfRanks], scheme: str) -> Fitted:
    num_ranks, make = SCHEMES[scheme]
    return fit(style, make(), devices=num_ranks)


def assert_as_alone(style: type[OfRanks], scheme: str) -> None:
    got = fit_under(style, scheme)
    torch.testing.assert_close(got.weights, alone(style).weights, rtol=1e-5, atol=2e-6)


def by_its_norm(grad: Tensor) -> Tensor:
    return grad / (1 + grad.norm())


def rows(grad: Tensor) -> Tensor:
    return grad - grad.mean(dim=0, keepdim=True)


def halved_in_place(grad: Tensor) -> None:
    grad.mul_(0.5)


def clamped(grad: Tensor) -> Tensor:
    return grad.clamp(-0.01, 0.01)


HOOKS: Sequence[Callable[[Tensor], Any]] = (by_its_norm, rows, halved_in_place, clamped)


@cache
def hooked(hook: Callable[[Tensor], Any], *, late: bool) -> type[OfRanks]:
    def put(module: Any) -> None:
        for param in module.blocks.parameters():
            param.register_hook(hook)

    class Hooked(OfRanks):
        def __init__(self) -> None:
            super().__init__()
            if not late:
                put(self)

        def on_train_start(self) -> None:
            if late:
                put(self)

    return Hooked


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor", "pipeline"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_a_split_weight_gets_its_full_gradient(
    hook: Callable[[Tensor], Any], late: bool, scheme: str
) -> None:
    """A hook on a split weight got a part of its gradient."""
    assert_as_alone(hooked(hook, late=late), scheme)


def test_after_a_fit_hooks_get_gradients_as_autograd_has_them() -> None:
    got = fit_under(hooked(by_its_norm, late=False), "tensor")
    for param in got.model.blocks.parameters():
        assert list(gradient_hooks(param).values()) == [by_its_norm]


class AfterAccumulation(OfRanks):
    def __init__(self) -> None:
        super().__init__()
        for param in self.blocks.parameters():
            param.register_post_accumulate_grad_hook(self.scale)

    @staticmethod
    def scale(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.div_(1 + param.grad.norm())


@pytest.mark.parametrize("scheme", ["tensor", "pipeline"])
def test_a_hook_after_accumulation_of_a_split_weight_is_refused(scheme: str) -> None:
    """A hook after accumulation saw a part without a word."""
    with pytest.raises(ConfigError, match="register_post_accumulate_grad_hook"):
        fit_under(AfterAccumulation, scheme)


class HookedActivations(OfRanks):
    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        x.register_hook(lambda grad: grad * 0.5)
        for block in self.blocks:
            x = block(x)
            x.register_hook(lambda grad: grad * 0.9)
            x.retain_grad()
        return F.cross_entropy(self.head(x), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["zero3", "tensor", "pipeline", "hybrid"])
def test_hooks_on_activations_do_not_fail_on_stages_that_have_them_not(scheme: str) -> None:
    """Hooks on activations failed on stages that have them not."""
    assert_as_alone(HookedActivations, scheme)


class PenaltyOfInput(OfRanks):
    """A penalty of the gradient by the input, which goes into the network alone."""

    def penalised(self, batch: Any, of_input: Callable[[Tensor], Any], **options: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self(x * 2)
        (grad,) = torch.autograd.grad(out.sum() + of_input(x), x, create_graph=True, **options)
        loss = F.cross_entropy(out, batch[1])
        return loss if grad is None else loss + 0.01 * grad.square().mean()

    def loss(self, batch: Any) -> Tensor:
        return self.penalised(batch, lambda x: 0)


class PenaltyOfPart(PenaltyOfInput):
    """The input is used in the loss, too: a last stage knew this part of the gradient."""

    def loss(self, batch: Any) -> Tensor:
        return self.penalised(batch, lambda x: x.square().sum())


class PenaltyOrNone(PenaltyOfInput):
    """A gradient that may be missing, as it was on a last stage."""

    def loss(self, batch: Any) -> Tensor:
        return self.penalised(batch, lambda x: 0, allow_unused=True)


PENALTIES = (PenaltyOfInput, PenaltyOfPart, PenaltyOrNone)


@pytest.mark.parametrize("style", PENALTIES)
def test_a_gradient_by_the_input_of_a_pipeline_is_refused(style: type[OfRanks]) -> None:
    """A gradient by the input was the last stage's part of it."""
    with pytest.raises(ConfigError, match="what earlier stages of the pipeline compute with"):
        fit_under(style, "pipeline")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["zero2", "zero3", "tensor"])
def test_a_penalty_of_the_gradient_by_the_input(scheme: str) -> None:
    assert_as_alone(PenaltyOfPart, scheme)


class ForwardDerivative(OfRanks):
    def loss(self, batch: Any) -> Tensor:
        ones = torch.ones_like(batch[0])
        out, slope = torch.func.jvp(self.forward, (batch[0],), (ones,))
        return F.cross_entropy(out, batch[1]) + 0.01 * slope.square().mean()


class ByDuals(OfRanks):
    def loss(self, batch: Any) -> Tensor:
        with forward_ad.dual_level():
            out = self(forward_ad.make_dual(batch[0], torch.ones_like(batch[0])))
            primal, slope = forward_ad.unpack_dual(out)
        return F.cross_entropy(primal, batch[1]) + 0.01 * slope.square().mean()


class Linearized(OfRanks):
    def loss(self, batch: Any) -> Tensor:
        _, slope = torch.func.linearize(self.forward, batch[0])
        slopes = slope(torch.ones_like(batch[0])).square().mean()
        return F.cross_entropy(self(batch[0]), batch[1]) + 0.01 * slopes


class RowsTogether(OfRanks):
    """Takes several rows of a Jacobian in one backward, which torch does by `vmap`."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self(x)
        rows = torch.ones(2, *out.shape) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
        (slope,) = torch.autograd.grad(out, x, rows, is_grads_batched=True, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.01 * slope.square().mean()


class OneByOne(OfRanks):
    def loss(self, batch: Any) -> Tensor:
        out = torch.func.vmap(lambda x: self(x[None])[0])(batch[0])
        return F.cross_entropy(out, batch[1])


TRANSFORMED = [ForwardDerivative, OneByOne, ByDuals, Linearized, RowsTogether]


@pytest.mark.few_cases(6)
@pytest.mark.filterwarnings("ignore:.*parameters outside of their stage")
@pytest.mark.parametrize("style", TRANSFORMED)
@pytest.mark.parametrize("scheme", ["tensor", "zero3", "pipeline"])
def test_a_network_in_a_function_transform_is_refused(style: type[OfRanks], scheme: str) -> None:
    """By `forward_ad`, `linearize` and `is_grads_batched` it was torch's error of no rule."""
    if style is RowsTogether and scheme != "tensor":
        if scheme == "zero3":  # whose backward gathers and needs no rule
            assert_as_alone(style, scheme)
        return
    with pytest.raises(ConfigError, match="another of torch's function transforms"):
        fit_under(style, scheme)


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # linearize's own graph
@pytest.mark.parametrize("style", TRANSFORMED)
def test_a_network_in_a_function_transform_on_copies_of_the_model(style: type[OfRanks]) -> None:
    assert_as_alone(style, "zero2")


class SetByHand(OfRanks):
    """Sets gradients of two losses, as methods of multi-task learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        out, params = self(batch[0]), list(self.parameters())
        loss = F.cross_entropy(out, batch[1])
        first = torch.autograd.grad(loss, params, retain_graph=True)
        second = torch.autograd.grad(out.square().mean(), params)
        for param, one, other in zip(params, first, second, strict=True):
            param.grad = one + 0.5 * other
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero3", "tensor", "tensor_zero2"])
def test_gradients_set_by_hand_train_where_one_rank_has_the_samples(scheme: str) -> None:
    """Gradients set by hand were refused where one rank has the samples."""
    assert_as_alone(SetByHand, scheme)


class AssignedThenRead(OfRanks):
    def on_after_backward(self) -> None:
        first, *others = [param for param in self.parameters() if param.grad is not None]
        first.grad = first.grad * 0.5
        assert others[-1].grad.norm() > 0
        for param in others:
            param.grad = param.grad / (1 + first.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.stack([param.grad.norm() for param in self.parameters()]).norm()
        for param in self.parameters():
            param.grad = param.grad / (1 + total)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["pipeline", "tensor", "zero2", "hybrid"])
def test_norms_of_assigned_gradients_are_known_to_all_ranks_alike(scheme: str) -> None:
    """Stages disagreed on whose norms were known, and one waited for messages of others."""
    assert_as_alone(AssignedThenRead, scheme)


class FilledWithZeros(OfRanks):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3, foreach=True)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["zero1", "zero2", "zero3", "tensor", "pipeline"])
def test_gradients_are_filled_with_zeros_by_an_operation_on_lists(scheme: str) -> None:
    """What stands in `.grad` returned the list, and torch raised an error of its own."""
    assert_as_alone(FilledWithZeros, scheme)


class OddBatches(OfRanks):
    """Every second batch leaves a layer out, registered after the blocks and called before."""

    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 1}

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] if batch_idx % 2 else self.branch(batch[0])
        return F.cross_entropy(self(x), batch[1])

    def on_after_backward(self) -> None:
        self.there = [param.grad is not None for param in self.branch.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.there == [batch_idx % 2 == 0] * 2


class OddMicrobatches(OddBatches):
    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx // 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.there == [batch_idx // 2 % 2 == 0] * 2


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:.*parameters outside of their stage")
@pytest.mark.parametrize("style", [OddBatches, OddMicrobatches])
@pytest.mark.parametrize("scheme", ["pipeline", "hybrid", "tensor", "zero2", "zero3"])
def test_a_gradient_that_no_batch_brought_is_none(style: type[OfRanks], scheme: str) -> None:
    """What a first stage had borrowed and not used came back as zeros, and momentum went on."""
    assert_as_alone(style, scheme)


class FrozenInMidRun(OfRanks):
    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        frozen = [*self.embed.parameters(), *self.blocks[1].parameters()]
        assert {p.grad is None for p in frozen} == {self.global_step >= 2}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["tensor", "shard_ddp", "zero1", "zero3", "hybrid", "pipeline"])
def test_a_layer_that_is_frozen_in_mid_run_stays_where_it_is(scheme: str) -> None:
    """Under tensor parallel a gradient that was set to None came back, and the layer moved on."""
    assert_as_alone(FrozenInMidRun, scheme)
