"""Steps and hooks that compute with weights and their averaged gradients, under every scheme."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lightning_shard.errors import ConfigError
from tests.strategies.decoders import (
    DECODER_SCHEMES,
    OF_STAGES,
    WIDTH,
    Decoder,
    assert_as_alone,
    fit_decoder,
)
from tests.strategies.parity import ignoring
from tests.strategies.stacks import fit

pytestmark = ignoring("A step uses .* outside of their stage")


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


def _keeps_momentum(param: Any) -> None:
    if not hasattr(param, "momentum"):
        param.momentum = torch.zeros_like(param)
    param.momentum.mul_(0.9).add_(param.grad)
    param.sub_(param.momentum, alpha=0.1)


def _keeps_moments(param: Any) -> None:
    mean = vars(param).setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
    square = vars(param).setdefault("square", torch.zeros_like(param))
    square.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
    param.num_updates = getattr(param, "num_updates", 0) + 1
    scale = 1 - 0.9**param.num_updates
    param.addcdiv_(mean / scale, (square / scale).sqrt().add_(1e-3), value=-0.01)


def _keeps_every_other(param: Any) -> None:
    if hasattr(param, "last"):
        param.sub_(0.1 * param.last)
        del param.last
    else:
        param.last = param.grad.clone()


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
    "attribute": _keeps_momentum,
    "attributes": _keeps_moments,
    "deleted": _keeps_every_other,
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
ON_MANY_RANKS = [pytest.param(one, marks=pytest.mark.slow) for one in OF_STAGES]
OF_PARTS = ["zero3", "tensor", pytest.param("tensor_zero3", marks=pytest.mark.slow)]


class ByHand(Decoder):
    """Updates its weights in the step itself, or changes gradients there."""

    update: Callable[[Any], Any]
    steps: bool
    graph = False

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        with torch.set_grad_enabled(self.graph):
            for param in self.parameters():
                type(self).update(param)
        if self.steps:
            optimizer.step()
        return loss


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", UPDATES)
def test_a_step_updates_weights_by_their_gradients(name: str, scheme: str) -> None:
    """Tensor parallel refused it, or raised torch's own error: only hooks could."""
    own = {"update": staticmethod(UPDATES[name]), "steps": False}
    assert_as_alone(type("Hand", (ByHand,), own), scheme)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_step_changes_gradients_by_the_weights(name: str, scheme: str) -> None:
    """A layer's bias behind a sum, which each rank has, lost what was added to its gradient."""
    own = {"update": staticmethod(GRADIENTS[name]), "steps": True}
    assert_as_alone(type("Hand", (ByHand,), own), scheme)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_step_changes_gradients_by_the_weights_in_a_graph(name: str, scheme: str) -> None:
    """Without `no_grad` weights became full under stage 3, and torch refused to set gradients."""
    own = {"update": staticmethod(GRADIENTS[name]), "steps": True, "graph": True}
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


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_PARTS)
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


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", [*SCHEMES, "pipeline"])
@pytest.mark.parametrize("name", UPDATES)
def test_a_hook_updates_weights_by_their_gradients(name: str, scheme: str) -> None:
    """What wrote to full tensors met this rank's part of the weight, or of the gradient."""
    own = {"update": staticmethod(UPDATES[name]), "graph": False}
    assert_as_alone(type("Hook", (InHook,), own), scheme)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", [*SCHEMES, "pipeline"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_hook_changes_gradients_by_the_weights_in_a_graph(name: str, scheme: str) -> None:
    """Without `no_grad`, torch refused to write to views of the buffer of whole gradients."""
    own = {"update": staticmethod(GRADIENTS[name]), "graph": True}
    assert_as_alone(type("Hook", (InHook,), own), scheme)


class Kept(Decoder):
    """Draws weights to what one hook, or a step, has kept on each."""

    where: str

    def keep(self, where: str) -> None:
        if where == type(self).where:
            for number, param in enumerate(self.parameters()):
                param.anchor, param.strength = 0.5 * param.detach(), 0.01 * number

    def build(self) -> None:
        self.double().keep("__init__")

    def setup(self, stage: str) -> None:
        self.keep("setup")

    def configure_optimizers(self) -> Any:
        self.keep("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.keep("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        params: Any = list(self.parameters())
        return loss + sum(one.strength * (one - one.anchor).square().sum() for one in params)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", [*SCHEMES, *ON_MANY_RANKS])
@pytest.mark.parametrize("where", ["__init__", "setup", "configure_optimizers", "on_train_start"])
def test_a_step_finds_what_hooks_keep_on_weights(where: str, scheme: str) -> None:
    """Weights of split layers and of other stages had none of it in steps."""
    style = type("KeptWhere", (Kept,), {"where": where})
    if where == "on_train_start" and scheme == "2x2x2_zero3":  # a hook, of shards of stages
        with pytest.raises(ConfigError, match=r"reads elements of 'embed\.weight' outside"):
            fit_decoder(style, scheme)
    else:
        assert_as_alone(style, scheme)


class KeptInStep(Decoder):
    """Keeps on weights in steps what hooks, validation and later steps go on with."""

    options: ClassVar[dict[str, Any]] = {"limit_val_batches": 1, "val_check_interval": 1}

    def build(self) -> None:
        self.head.weight = self.embed.weight
        self.listed = [self.embed.weight, self.blocks[0].up.weight]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        params: Any = list(self.parameters())
        for param in params:
            param.before, param.scale = param.detach().clone(), 1 / (batch_idx + 1)
        loss = super().training_step(batch, batch_idx)
        shift: Any = self.head.weight - getattr(self.embed.weight, "seen", 0.0)
        return loss + 0.1 * shift.square().sum() + self.listed[1].scale * self.listed[1].sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            param.grad.mul_(param.scale)

    def on_train_batch_end(self, *_: Any) -> None:
        for param in self.parameters():
            param.data = 0.7 * param.data + 0.3 * param.before
            del param.before

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.listed[0].seen = 0.5 * self.embed.weight


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_hooks_and_steps_find_what_a_step_keeps_on_weights(scheme: str) -> None:
    """Under tensor parallel it was on what one step had made, and `param.data = kept` crashed."""
    assert_as_alone(KeptInStep, scheme)


class KeptInMicrobatches(Decoder):
    """Keeps on weights in steps what is the same in each microbatch of a batch, or is not."""

    counts = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        params: Any = list(self.parameters())
        for param in params:
            param.scale = 1 / (batch_idx + 1)
            param.penalty = param.square().sum()
            if self.counts:
                param.count = getattr(param, "count", 0) + 1
        return super().training_step(batch, batch_idx) + 0.1 * sum(one.penalty for one in params)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(param.scale)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_STAGES)
def test_hooks_find_what_each_microbatch_keeps_alike_on_weights(scheme: str) -> None:
    """Only the weights of a rank's own stages had it, and none of split layers."""
    assert_as_alone(KeptInMicrobatches, scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_STAGES)
def test_what_each_microbatch_keeps_on_weights_anew_is_refused_by_name(scheme: str) -> None:
    """A count of batches counted microbatches."""
    with pytest.raises(ConfigError, match=r"changes .*\.count.* again in each microbatch"):
        fit_decoder(type("Counts", (KeptInMicrobatches,), {"counts": True}), scheme)


class PutBack(ByHand):
    """Takes the gradient uphill, and assigns the weights of before, outside of `no_grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = Decoder.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for param in self.parameters():
                param.old = param.data.clone()
                param.add_(param.grad, alpha=0.05)
        optimizer.zero_grad()
        self.manual_backward(Decoder.training_step(self, batch, batch_idx))
        for param in self.parameters():
            param.data = param.old
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_PARTS)
def test_a_step_assigns_what_it_kept_on_weights(scheme: str) -> None:
    """Stage 3 of ZeRO raised torch's own error for weights of layers that are not split."""
    assert_as_alone(PutBack, scheme)


class Differentiated(ByHand):
    """Sets the gradients of weights that it keeps in a list, or has from its optimizer."""

    from_optimizer: bool

    def build(self) -> None:
        super().build()
        self.listed = list(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = Decoder.training_step(self, batch, batch_idx)
        kept = optimizer.param_groups[0]["params"] if self.from_optimizer else self.listed
        for param, grad in zip(kept, torch.autograd.grad(loss, kept), strict=True):
            param.grad = grad
        optimizer.step()
        return loss


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_PARTS)
@pytest.mark.parametrize("from_optimizer", [True, False])
def test_a_step_sets_gradients_of_weights_that_it_keeps(from_optimizer: bool, scheme: str) -> None:
    """One weight among them that is not cut made the gradients of all those of parts.

    With stage 3 of ZeRO they were those of parts, too, which torch refused as `.grad`.
    """
    own = {"from_optimizer": from_optimizer}
    assert_as_alone(type("Kept", (Differentiated,), own), scheme)


class DataOfAnother(Decoder):
    """Puts a tensor into `.data` of a plain tensor, and computes with this."""

    value: Callable[[Any], Tensor]
    is_written = False

    def build(self) -> None:
        self.listed = [self.blocks[0].up.weight]
        self.register_buffer("average", torch.zeros(2 * WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        other: Any = torch.zeros(3, dtype=torch.float64)
        other.data = type(self).value(self)
        if self.is_written:
            with torch.no_grad():
                other.mul_(0.9)
        return super().training_step(batch, batch_idx) * (1 + 0.1 * other.square().sum())


def _averaged(model: Any) -> Tensor:
    model.average.data = 0.9 * model.average + 0.1 * model.blocks[0].up.weight.detach()
    return model.average.clone()


OWN_ELEMENTS: dict[str, Callable[[Any], Tensor]] = {
    "computed": lambda model: 2 * model.blocks[0].up.weight,
    "cloned": lambda model: model.blocks[0].up.weight.detach().clone(),
    "averaged": _averaged,
    "gradient": lambda model: model.blocks[0].up.weight.grad.clone(),
    "bias": lambda model: model.blocks[0].down.bias.detach().clone(),
}
OF_WEIGHTS: dict[str, Callable[[Any], Tensor]] = {
    "weight": lambda model: model.blocks[0].up.weight,
    "data": lambda model: model.blocks[0].up.weight.data,
    "detached": lambda model: model.blocks[0].down.weight.detach(),
    "rows": lambda model: model.blocks[0].down.weight.detach()[:2],
    "listed": lambda model: model.listed[0],
}


class ManualData(DataOfAnother):
    """Does so after the backward, whose gradients are there then."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Decoder.training_step(self, batch, batch_idx))
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", OWN_ELEMENTS)
def test_a_step_sets_data_of_a_plain_tensor_to_what_it_computes(name: str, scheme: str) -> None:
    """A tensor without memory ended the process with a segmentation fault."""
    own = {"value": staticmethod(OWN_ELEMENTS[name])}
    assert_as_alone(type("Data", (ManualData,), own), scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("scheme", ["zero2", "zero3", "context_zero3"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_a_plain_tensor_lies_in_the_memory_of_a_weight(
    name: str, scheme: str, is_written: bool
) -> None:
    """Stage 3 of ZeRO put this rank's shard there, without a word, or nothing at all."""
    own = {"value": staticmethod(OF_WEIGHTS[name]), "is_written": is_written}
    assert_as_alone(type("Data", (DataOfAnother,), own), scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3", "2x2x2"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_the_memory_of_a_split_weight_for_a_plain_tensor_is_refused(name: str, scheme: str) -> None:
    """It ended the process with a segmentation fault."""
    own = {"value": staticmethod(OF_WEIGHTS[name])}
    with pytest.raises(ConfigError, match=r"\.data of another tensor was set to a weight .* in a"):
        fit_decoder(type("Data", (DataOfAnother,), own), scheme)


class Swapped(Decoder):
    """Swaps a weight with a plain tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        other = torch.zeros(2 * WIDTH, WIDTH)
        torch.utils.swap_tensors(other, self.blocks[0].up.weight)  # type: ignore[no-untyped-call]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("scheme", ["zero3", "tensor"])
def test_a_step_that_swaps_a_weight_is_refused_by_name(scheme: str) -> None:
    """Stage 3 of ZeRO raised an error of its own."""
    with pytest.raises(ConfigError, match=r"swap_tensors\(\)"):
        fit_decoder(Swapped, scheme)


class WrittenInHook(Decoder):
    """Shrinks a weight in a hook, by a plain tensor that lies in its memory."""

    def on_train_batch_end(self, *_: Any) -> None:
        other: Any = torch.zeros(3, dtype=torch.float64)
        other.data = self.blocks[0].up.weight
        other.mul_(0.9)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["zero2", "zero3", "tensor", "pipeline"])
def test_a_hook_writes_by_a_plain_tensor_in_the_memory_of_a_weight(scheme: str) -> None:
    """Under stage 3 of ZeRO the tensor was a copy."""
    assert_as_alone(WrittenInHook, scheme)


class KeptTogether(Decoder):
    """Computes with two weights that it keeps in a list, and with one of them twice."""

    def build(self) -> None:
        self.listed = [self.blocks[0].up.weight, self.blocks[0].down.weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        up, down = self.listed
        penalty = (up @ down).square().sum() + (down * down).sum()
        return super().training_step(batch, batch_idx) + 0.1 * penalty


@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3"])
def test_a_step_computes_with_several_weights_that_it_keeps(scheme: str) -> None:
    """With stage 3 of ZeRO the second was this rank's part."""
    assert_as_alone(KeptTogether, scheme)


class Copied(Decoder):
    """Draws weights to copies that its first step has made."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        params = list(self.parameters())
        if not hasattr(self, "first"):
            self.first = copy.deepcopy(params)
            assert all(one.is_leaf and one.requires_grad for one in self.first)
        loss = super().training_step(batch, batch_idx)
        pairs = zip(params, self.first, strict=True)
        return loss + 0.1 * sum((one - first.detach()).square().sum() for one, first in pairs)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", OF_PARTS)
def test_a_step_copies_weights(scheme: str) -> None:
    """Torch's own error said that a weight of tensor parallel was no leaf."""
    assert_as_alone(Copied, scheme)


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
