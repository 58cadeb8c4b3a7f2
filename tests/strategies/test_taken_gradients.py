"""Gradients that a step takes by itself are those of one device, or refused by name."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard import ConfigError
from tests.strategies.decoders import (
    OF_STAGES,
    VOCABULARY,
    WITHOUT_STAGES,
    Decoder,
    DecoderBlock,
    assert_as_alone,
    fit_decoder,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring(
    ".*microbatches are fewer than the", "A step uses .* parameters outside of their stage"
)
OF_ONE_BATCH = ["tensor", "context"]  # whose ranks all have the same samples


class InputPenalty(Decoder):
    """A penalty of what the loss of each sample makes of its embedded tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.start(batch[0])
        logits = self.head(self.hidden(x))
        (grad,) = torch.autograd.grad(self.score(logits, batch[1]), x, create_graph=True)
        return self.loss(batch) + 0.1 * grad.square().sum((1, 2)).mean()

    def start(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class LeafPenalty(InputPenalty):
    def start(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).detach().requires_grad_()


class LogitPenalty(InputPenalty):
    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.gather(-1, targets.unsqueeze(-1)).sum()


class SmoothPenalty(InputPenalty):
    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, 1), targets.flatten()
        weight = torch.linspace(0.5, 1.5, VOCABULARY, dtype=logits.dtype)
        return F.cross_entropy(logits, targets, weight, reduction="sum", label_smoothing=0.1)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
@pytest.mark.parametrize("style", [InputPenalty, LeafPenalty, LogitPenalty, SmoothPenalty])
def test_a_second_derivative_has_what_a_gradient_that_crosses_ranks_depends_on(
    style: type[Decoder], scheme: str
) -> None:
    """A second derivative lost what a gradient that crosses ranks depends on."""
    assert_as_alone(style, scheme)


class WeightPenalty(Decoder):
    """A penalty of the gradient of some weights, which is of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, list(self.chosen().parameters()), create_graph=True)
        return loss + 0.1 * sum(one.square().sum() for one in grads)

    def chosen(self) -> nn.Module:
        return self


class HeadPenalty(WeightPenalty):
    def chosen(self) -> nn.Module:
        return self.head


class MeanPenalty(Decoder):
    """The same with gradients that are averaged over the ranks first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        mean = [self.averaged(grad) for grad in grads]
        return loss + 0.1 * sum(grad.square().sum() for grad in mean)

    def averaged(self, grad: Tensor) -> Tensor:
        every: Any = self.all_gather(grad, sync_grads=True)
        return every.mean(0) if every.ndim > grad.ndim else every


@pytest.mark.slow
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
def test_a_gradient_of_the_whole_batch_can_be_penalised(scheme: str) -> None:
    assert_as_alone(MeanPenalty, scheme)


class InnerStep(Decoder):
    """The loss after a step of the head (MAML)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, targets = self.hidden(self.embed(batch[0])), batch[1].flatten()
        head = dict(self.head.named_parameters())
        inner = F.cross_entropy(self.head(x).flatten(0, 1), targets)
        grads = torch.autograd.grad(inner, list(head.values()), create_graph=True)
        new = {name: p - 0.1 * g for (name, p), g in zip(head.items(), grads, strict=True)}
        logits = torch.func.functional_call(self.head, new, (x,))
        return F.cross_entropy(logits.flatten(0, 1), targets)


class SecondOrder(Decoder):
    """Reads a product with the Hessian."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, params = self.loss(batch), list(self.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        twice = torch.autograd.grad(sum(g.sum() for g in grads), params, retain_graph=True)
        loss = loss + 1e-3 * sum(float(one.norm()) for one in twice)  # shown by the loss
        return loss


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_ONE_BATCH)
@pytest.mark.parametrize("style", [WeightPenalty, HeadPenalty, InnerStep, SecondOrder])
def test_a_gradient_that_a_step_takes_is_one_devices(style: type[Decoder], scheme: str) -> None:
    """A gradient that a step took was of a tensor that stands for a weight or a summand."""
    assert_as_alone(style, scheme)


class OfSomeInputs(Decoder):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(inputs=[*self.head.parameters(), *self.blocks.parameters()])


class ByAutogradGrad(Decoder):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        params = list(self.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad


@pytest.mark.slow
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
def test_a_backward_to_some_inputs_reaches_split_weights(scheme: str) -> None:
    """A backward to some inputs left out split weights."""
    assert_as_alone(OfSomeInputs, scheme)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
def test_gradients_set_in_a_backward_of_the_users_train_or_are_refused(scheme: str) -> None:
    """Gradients set in a backward of the user's were torch's error."""
    if scheme.endswith("zero3"):
        with pytest.raises(ConfigError, match=r"set to a tensor of shape .* in the middle of a"):
            fit_decoder(ByAutogradGrad, scheme)
        return
    assert_as_alone(ByAutogradGrad, scheme)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_STAGES)
@pytest.mark.parametrize("style", [OfSomeInputs, ByAutogradGrad, WeightPenalty, LeafPenalty])
def test_asking_a_pipeline_for_some_gradients_is_refused(style: type[Decoder], scheme: str) -> None:
    """A pipeline took all gradients where some were asked for."""
    with pytest.raises(ConfigError, match=r"asks for gradients of|several times in a step"):
        fit_decoder(style, scheme)


class CalledWith(Decoder):
    """Weights given for a call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            given = {name: 1.01 * param for name, param in block.named_parameters()}
            x = torch.func.functional_call(block, given, (x,))
        head = {name: 1.01 * param for name, param in self.head.named_parameters()}
        logits = torch.func.functional_call(self.head, head, (self.norm(x),))
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class CalledWithItsOwn(CalledWith):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.func.functional_call(
            self.head, dict(self.head.named_parameters()), (self.hidden(self.embed(tokens)),)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3", "zero3", "2x2x2", "2x2x2_zero3"])
@pytest.mark.parametrize("style", [CalledWith, CalledWithItsOwn])
def test_a_split_layer_may_be_given_full_weights_for_a_call(
    style: type[Decoder], scheme: str
) -> None:
    """Full weights given to a split layer for a call were taken for its part."""
    assert_as_alone(style, scheme)


class PerSample(Decoder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.hidden(self.embed(batch[0])).detach()
        given = {name: param.detach() for name, param in self.head.named_parameters()}

        def loss(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(self.head, given, (x,)), y)

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        grads: Sequence[Tensor] = list(each(given, x, batch[1]).values())
        return self.loss(batch) + 0.0 * sum(one.square().sum() for one in grads)


@pytest.mark.parametrize("scheme", ["tensor", "context"])
def test_torchs_function_transforms_are_refused_with_advice(scheme: str) -> None:
    """Torch's function transforms failed without advice."""
    with pytest.raises(ConfigError, match="another of torch's function transforms"):
        fit_decoder(PerSample, scheme)


class RecomputedBlock(DecoderBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedInside(Decoder):
    block = RecomputedBlock


class Recomputed(Decoder):
    reentrant = False

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


class RecomputedReentrant(Recomputed):
    reentrant = True


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["2x2x2_zero3", "tensor_zero3", "context", "context_zero3"])
@pytest.mark.parametrize("style", [RecomputedInside, Recomputed, RecomputedReentrant])
def test_what_a_backward_recomputes_sees_the_split_tensors_of_the_forward(
    style: type[Decoder], scheme: str
) -> None:
    """What a backward recomputes saw no split tensors or more than the forward."""
    assert_as_alone(style, scheme)
