"""Weights that hooks set, in whichever way, are those that a single device goes on with."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard import ConfigError
from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import OfEveryRank, fit

pytestmark = ignoring(".*microbatches are fewer than the")


def assigned(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9


def from_a_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def swapped(model: Any) -> None:
    one, other = model.blocks[0].layer.weight, model.blocks[1].layer.weight
    one.data, other.data = other.data, one.data


@torch.no_grad()
def set_to_a_tensor(model: Any) -> None:
    weight = model.blocks[0].layer.weight
    weight.set_(weight.detach().clone() * 0.8)


@torch.no_grad()
def set_and_used(model: Any) -> None:
    weight, bias = model.blocks[0].layer.weight, model.blocks[1].layer.bias
    kept = weight.detach()
    weight.set_(torch.linspace(-1, 1, weight.numel()).reshape(weight.shape))
    weight.set_(weight * float(weight.abs().mean()) + 0 * kept)
    weight.mul_(1 + float(weight.norm()) / 100)
    bias.set_(bias.flip(0))
    bias.add_(bias.sum())


def of_one_layer(model: Any) -> None:
    model.blocks[0].layer.weight.data = model.blocks[0].layer.weight.data * 0.9


def in_place(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


WAYS = [
    assigned,
    from_a_vector,
    swapped,
    set_to_a_tensor,
    set_and_used,
    of_one_layer,
    in_place,
]
HOOKS = [
    "on_train_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_epoch_end",
]
CASES = [
    (way, hook)
    for way in WAYS
    for hook in HOOKS
    # Which autograd itself refuses.
    if hook != "on_before_zero_grad" or way not in (set_to_a_tensor, set_and_used)
]
TOO_LATE = ("zero3", "pipeline", "hybrid")  # for edits between forward and backward


@cache
def style(way: Callable[[Any], None], hook: str) -> type[OfRanks]:
    def run(self: Any, *_: Any) -> None:
        way(self)

    return type(f"{way.__name__}_in_{hook}", (OfRanks,), {hook: run})


alone: Any = cache(fit)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("way", "hook"), CASES)
def test_weights_set_in_a_hook_part_from_a_single_devices(
    way: Callable[[Any], None], hook: str, scheme: str
) -> None:
    num_ranks, make = SCHEMES[scheme]
    made = style(way, hook)
    is_seen = scheme != "zero3" or way is not in_place  # which a single device takes in, too
    if hook == "on_before_zero_grad" and scheme in TOO_LATE and is_seen:
        with pytest.raises(ConfigError, match="backward"):
            fit(made, make(), devices=num_ranks)
        return
    got = fit(made, make(), devices=num_ranks)
    torch.testing.assert_close(got.weights, alone(made).weights, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("way", [assigned, in_place])
def test_edits_before_a_pipelines_backward_that_is_over_are_refused(
    way: Callable[[Any], None],
) -> None:
    """A pipeline took edits before a backward that was over without a word."""
    num_ranks, make = SCHEMES["pipeline"]
    with pytest.raises(ConfigError, match="between training_step and its backward"):
        fit(style(way, "on_before_zero_grad"), make(), devices=num_ranks)


class ReadsBoth(OfRanks):
    """Multiplies gradients and weights before an update by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(sum((p.grad * p).sum() for p in self.parameters()).detach()))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2", "zero3"])
def test_weights_read_with_gradients_before_an_update_by_hand_are_full(
    scheme: str,
) -> None:
    """Weights read with gradients before an update by hand failed without advice."""
    num_ranks, make = SCHEMES[scheme]
    got, expected = fit(ReadsBoth, make(), devices=num_ranks), alone(ReadsBoth)
    assert got.model.seen == pytest.approx(expected.model.seen, rel=1e-4, abs=1e-6)


def replaced(model: Any) -> None:
    for layer in (model.head, model.blocks[0].layer):
        layer.weight = nn.Parameter(layer.weight.detach().clone() * 0.9)


def other_optimizer(model: Any) -> None:
    strategy = model.trainer.strategy
    strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def checkpoint(model: Any) -> None:
    model.trainer.save_checkpoint(f"{model.trainer.default_root_dir}/of_a_hook.ckpt")


def state(model: Any) -> None:
    model.trainer.strategy.lightning_module_state_dict()


def forward(model: Any) -> None:
    model.trainer.strategy.validation_step([torch.ones(2, 4), torch.zeros(2).long()], 0)


class Twice(OfRanks):
    """Sets weights before and after this package has worked in the same hook."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


@cache
def twice(way: Callable[[Any], None], work: Callable[[Any], None]) -> type[Twice]:
    def run(self: Any, *_: Any) -> None:
        way(self)
        work(self)
        if way is not replaced:
            way(self)
        elif work is not other_optimizer:
            way(self)
            other_optimizer(self)

    return type(f"{way.__name__}_{work.__name__}", (Twice,), {"on_train_batch_end": run})


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("work", [other_optimizer, checkpoint, state, forward])
@pytest.mark.parametrize("way", [assigned, set_to_a_tensor, in_place, replaced])
def test_what_a_hook_has_set_stays_where_the_engine_works_in_it(
    way: Callable[[Any], None], work: Callable[[Any], None], scheme: str, tmp_path: Path
) -> None:
    """What a hook had set was lost where the engine works in it."""
    num_ranks, make = SCHEMES[scheme]
    made = twice(way, work)
    got = fit(made, make(), devices=num_ranks, default_root_dir=str(tmp_path))
    expected = fit(made, default_root_dir=str(tmp_path))
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-5, atol=2e-6)


def numbers(model: Any) -> list[float]:
    """Return what depends on shape and order of weights, of layers that are split and others."""
    head, first = model.head.weight.detach(), model.blocks[0].layer
    read = [head[0].abs(), model.embed.weight.mean(0), head.norm(dim=1), model.head.bias.flip(0)]
    read += [first.weight.detach().t()[1], first.bias.sort().values, head @ first.weight[0]]
    return torch.cat([one.detach().flatten() for one in read]).tolist()


@cache
def reader(hook: str) -> type[OfRanks]:
    def run(self: Any, *_: Any) -> None:
        self.seen.append(numbers(self))

    def build(self: Any) -> None:
        OfRanks.__init__(self)
        self.seen: list[list[float]] = []

    return type(f"Reads_in_{hook}", (OfRanks,), {hook: run, "__init__": build})


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_read_a_ranks_shards_of_layers_that_are_not_split(hook: str, scheme: str) -> None:
    """Before an update, under tensor parallel with stage 1 or 2."""
    num_ranks, make = SCHEMES[scheme]
    of_ranks = OfEveryRank()
    fit(reader(hook), make(), devices=num_ranks, callbacks=[of_ranks])
    expected = torch.tensor(alone(reader(hook)).model.seen)
    assert len(of_ranks.ranks) == num_ranks
    for seen in of_ranks.ranks:
        torch.testing.assert_close(torch.tensor(seen), expected, rtol=1e-4, atol=1e-5)


def doubled(model: Any) -> None:
    for p in model.parameters():
        p.grad = 2 * p.grad


def of_one_value(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.01)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", [doubled, of_one_value])
def test_gradients_set_before_an_update_part_from_a_single_devices(
    way: Callable[[Any], None], scheme: str
) -> None:
    num_ranks, make = SCHEMES[scheme]
    made = style(way, "on_before_optimizer_step")
    got = fit(made, make(), devices=num_ranks)
    torch.testing.assert_close(got.weights, alone(made).weights, rtol=1e-5, atol=2e-6)
