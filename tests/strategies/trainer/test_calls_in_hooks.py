"""Hooks that call layers, blocks and the whole of a split model, and read weights after that."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import ConfigError, HybridParallelStrategy
from tests.strategies.data_parallel.hooked import PLAN, Hooked, assert_equal, fit
from tests.strategies.parity import ignoring

pytestmark = ignoring()

HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
]


class Calls(Hooked):
    """The base; notes how large weights look, and what is in them, after calls in a hook."""

    def note(self) -> None:
        layer, other = self.blocks[0].layer, self.blocks[2].layer
        for param in (layer.weight, next(iter(other.parameters())), layer.bias):
            self.see(param.detach().norm())
            self.see(param.numel() + param.shape[0])
        self.see(dict(self.net.named_parameters())["blocks.1.layer.weight"].detach().sum())
        self.see(self.net.embed.weight.detach().norm())

    def calls(self) -> None:
        """Call what the class is about."""

    def noted(self) -> None:
        self.calls()
        self.note()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    val_dataloader = Hooked.train_dataloader


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)


class ALayer(Calls):
    def calls(self) -> None:
        self.see(self.blocks[0].layer(X).detach().norm())


class LayersAgain(Calls):
    @torch.no_grad()
    def calls(self) -> None:
        for number in (0, 2, 0, 0):
            self.see(self.blocks[number].layer(X).norm())
            self.note()


class ABlock(Calls):
    def calls(self) -> None:
        self.see(self.blocks[2](X).detach().norm())


class TheNetwork(Calls):
    def calls(self) -> None:
        self.see(self.net(X[:, :4]).detach().norm())


class ThroughFailures(Calls):
    def calls(self) -> None:
        for module in (self.blocks[0].layer, self.blocks[0], self.net):
            with pytest.raises(RuntimeError, match="shape"):
                module(torch.ones(3, 5, dtype=torch.float64))
            self.note()
        self.see(self.blocks[0](X).detach().norm())


class EditsAfterwards(Calls):
    @torch.no_grad()
    def calls(self) -> None:
        weight = self.blocks[0].layer.weight
        self.blocks[0].layer(X)
        weight.mul_(0.9)
        weight[0] += 0.01
        self.see(self.blocks[0].layer(X).norm())
        self.blocks[0].layer.bias.data = torch.full((8,), 0.1, dtype=torch.float64)
        self.see(self.blocks[0](X).norm())
        self.blocks[2].layer.load_state_dict(self.blocks[0].layer.state_dict())


class GoesBackward(Calls):
    """Reads weights between a call and its backward, which needs them full again."""

    def calls(self) -> None:
        with torch.enable_grad():
            x = X.clone().requires_grad_()
            for module in (self.blocks[0].layer, self.blocks[0], self.blocks[1]):
                value = module(x).square().sum()
                self.note()
                self.see(torch.autograd.grad(value, [x])[0].norm())
                self.note()
            value = self.net(x[:, :4]).square().sum()
            self.note()
            self.see(torch.autograd.grad(value, [x])[0].norm())


class AStep(Calls):
    def calls(self) -> None:
        self.see(self.trainer.strategy.training_step([X.view(6, 4)], 0))


STYLES: list[type[Calls]] = [
    ALayer,
    LayersAgain,
    ABlock,
    TheNetwork,
    ThroughFailures,
    EditsAfterwards,
    GoesBackward,
]


def in_hook(style: type[Calls], hook: str) -> type[Calls]:
    def run(self: Any, *_: Any) -> None:
        self.noted()

    return type(f"{style.__name__}_{hook}", (style,), {hook: run})


class WithLoss(Calls):
    """A hook's graph goes through a layer and into the loss of the step after it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.value: Tensor = self.blocks[0].layer(X).square().mean()
        self.note()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.value


class Differentiates(Calls):
    def on_train_batch_end(self, *_: Any) -> None:
        layer = self.blocks[0].layer
        self.see(torch.autograd.grad(layer(X).sum(), [layer.weight])[0].norm())


def split(stage: int) -> HybridParallelStrategy:
    return HybridParallelStrategy(
        backend="in_process", num_ranks=4, tensor_parallel_size=2, zero_stage=stage, plan=PLAN
    )


@pytest.mark.slow
@pytest.mark.parametrize("style", [ALayer, pytest.param(EditsAfterwards, marks=pytest.mark.slow)])
def test_calls_of_layers_in_shards_of_other_stages_are_refused(style: type[Calls]) -> None:
    """Torch said that a matrix was expected."""
    strategy = HybridParallelStrategy(
        backend="in_process",
        num_ranks=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        num_microbatches=2,
        zero_stage=3,
        plan=PLAN,
    )
    with pytest.raises(
        ConfigError, match=r"'net\.blocks\.0\.layer\.weight' .*, or calls its layer"
    ):
        fit(in_hook(style, "on_train_batch_end"), strategy)


alone: Any = cache(lambda style, hook: fit(in_hook(style, hook)))
SLOW = pytest.mark.slow
STAGES = [3, *(pytest.param(stage, marks=SLOW) for stage in (2, 1, 0))]
WITH_GRAPHS = ("on_before_zero_grad", "on_before_backward")  # which torch lets nobody edit
CASES = [
    pytest.param(style, hook, marks=() if quick else SLOW)
    for style in STYLES
    for hook in HOOKS
    if not (style is EditsAfterwards and hook in WITH_GRAPHS)
    for quick in [style is EditsAfterwards and hook == "on_train_batch_end"]
]


@pytest.mark.parametrize(("style", "hook"), CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_look_full_after_calls_in_hooks(style: type[Calls], hook: str, stage: int) -> None:
    """Under stage 3 they were this rank's part for the rest of the hook."""
    assert_equal(fit(in_hook(style, hook), split(stage)), alone(style, hook))


@pytest.mark.parametrize(
    ("hook", "stage"),
    [
        ("on_before_optimizer_step", 2),
        pytest.param("on_before_optimizer_step", 1, marks=SLOW),
        pytest.param("on_before_optimizer_step", 3, marks=SLOW),
        pytest.param("on_train_batch_end", 3, marks=SLOW),
    ],
)
def test_a_step_in_a_hook_has_full_weights(hook: str, stage: int) -> None:
    """Before an update torch said that a matrix was expected."""
    assert_equal(fit(in_hook(AStep, hook), split(stage)), alone(AStep, hook))


@SLOW
def test_a_graph_of_a_hook_goes_into_the_loss_of_a_step() -> None:
    assert_equal(fit(WithLoss, split(3)), fit(WithLoss))


@SLOW
def test_a_derivative_by_a_weight_in_parts_is_refused_after_a_call() -> None:
    """It was the derivative by this rank's part."""
    with pytest.raises(ConfigError, match=r"for the gradient of 'net\.blocks\.0\.layer\.weight'"):
        fit(Differentiates, split(3))
