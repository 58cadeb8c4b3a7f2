"""The arithmetic of a step: PaLM's formula on a GPT, frozen weights, and nothing done again."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples.train_gpt import GPT
from lightning_shard.planning.dry_run import flops_of_batch

WIDTH, LAYERS, CONTEXT, BATCH = 64, 3, 32, 4


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(context=CONTEXT, num_layers=LAYERS, num_heads=4, width=WIDTH)


def text() -> list[torch.Tensor]:
    return [torch.zeros(BATCH, CONTEXT, dtype=torch.long)] * 2


def test_palms_formula() -> None:
    module = gpt()
    matrices = sum(
        param.numel()
        for name, param in module.named_parameters()
        if param.ndim == 2 and "embedding" not in name
    )
    # 6 N and, of attention, 12 L H Q T of each token
    of_token = 6 * matrices + 12 * LAYERS * WIDTH * CONTEXT
    assert flops_of_batch(module, text(), "32-true") == BATCH * CONTEXT * of_token


def test_a_module_on_meta_has_the_same_figure() -> None:
    with torch.device("meta"):
        module = GPT(context=CONTEXT, num_layers=LAYERS, num_heads=4, width=WIDTH)
    meta = [one.to("meta") for one in text()]
    assert flops_of_batch(module, meta, "bf16-mixed") == flops_of_batch(gpt(), text(), "32-true")


class Net(pl.LightningModule):
    """Two layers of 16 x 16, which may be computed again in backward."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))
        self.layers = nn.Sequential(
            nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False)
        )
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        if self.again:
            return checkpoint(self.layers, x, use_reentrant=False).mean()
        return self.layers(x).mean()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch)


def flops(module: pl.LightningModule, batch: Any) -> int:
    return flops_of_batch(module, batch, "32-true")


PRODUCT = 2 * 8 * 16 * 16


@pytest.mark.parametrize("again", [False, True])
def test_what_is_computed_again_does_not_count(again: bool) -> None:
    assert flops(Net(again=again), torch.zeros(8, 16)) == 6 * PRODUCT


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    module = Net(again=False)
    module.shift.requires_grad_(False)
    module.layers[0].requires_grad_(False)
    assert flops(module, torch.zeros(8, 16)) == 3 * PRODUCT  # two forwards, and of one weight


def test_the_module_stays_as_it_is() -> None:
    module = gpt()
    before = copy.deepcopy(module.state_dict())
    flops_of_batch(module, text(), "32-true")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())
