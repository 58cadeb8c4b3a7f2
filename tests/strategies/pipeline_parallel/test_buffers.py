"""Buffers that the steps of a pipeline change, once for each microbatch."""

import warnings
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.nn.utils.parametrizations import spectral_norm

from tests.strategies.data_parallel.hooked import Hooked, assert_equal, fit, pipeline, replicas
from tests.strategies.parity import ignoring

pytestmark = ignoring()

alone: Any = cache(fit)


class Spectral(Hooked):
    """Of both kinds, in blocks of both stages and outside."""

    def build(self) -> None:
        first, second, third, *_ = self.blocks
        spectral_norm(first.layer, n_power_iterations=2)
        spectral_norm(second.layer)
        nn.utils.spectral_norm(third.layer)
        nn.utils.spectral_norm(self.net.head)


class DeepSpectral(Spectral):
    """One block for each of four stages."""

    def build(self) -> None:
        self.net.blocks.append(deepcopy(self.net.blocks[0]))
        super().build()


def interleaved() -> Any:
    return pipeline(schedule="interleaved_1f1b", split=[1, 2, 3])


@pytest.mark.parametrize(
    ("style", "strategy"),
    [
        (Spectral, pipeline),
        (Spectral, replicas),
        pytest.param(DeepSpectral, interleaved, marks=pytest.mark.slow),
    ],
)
def test_spectral_norms_are_iterated_once_per_batch(style: Any, strategy: Any) -> None:
    """Spectral norms were iterated once per microbatch."""
    assert_equal(fit(style, strategy()), alone(style))


class Counter(nn.Module):
    steps: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.mask


class Counts(Hooked):
    def build(self) -> None:
        for block in self.blocks:
            block.norm = nn.Sequential(block.norm, Counter())


def test_buffers_that_change_with_every_microbatch_are_told_of() -> None:
    """Buffers that change with every microbatch were not told of."""
    with pytest.warns(UserWarning, match="buffers") as caught:
        fit(Counts, pipeline())
    told = [str(one.message) for one in caught if "buffers" in str(one.message)]
    assert len(told) == 1
    assert "(steps) of 'net.blocks.0.norm.1' (Counter)" in told[0]
    assert "'net.blocks.2.norm.1'" in told[0]  # of the last stage's rank
    assert "num_microbatches=1" in told[0]


@pytest.mark.filterwarnings("ignore:1 microbatches are fewer than the 2 stages")
def test_a_batch_in_one_part_has_the_buffers_of_a_single_device() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*buffers")
        assert_equal(fit(Counts, pipeline(num_microbatches=1)), alone(Counts))


COMPUTED = {
    "power iteration": spectral_norm,
    "older norm": weight_norm,
    "norm": parametrizations.weight_norm,
    "mask": lambda layer: prune.l1_unstructured(layer, "bias", 0.4),
    "orthogonal": parametrizations.orthogonal,
}


class Computed(Hooked):
    """Its blocks compute their weights, and a hook looks at them."""

    kind = ""

    def build(self) -> None:
        for block in self.blocks:
            COMPUTED[self.kind](block.layer)

    def look(self) -> None:
        for block in self.blocks:
            self.see(block.layer.weight.norm() + block.layer.bias.norm())
        for buffer in self.buffers():
            self.see(buffer.sum())

    def on_before_zero_grad(self, *_: Any) -> None:
        self.look()

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("strategy", [pipeline, replicas])
def test_what_blocks_of_other_stages_compute_is_fresh_in_hooks(kind: str, strategy: Any) -> None:
    """So were the buffers of other stages; an attribute of an older norm was a placeholder."""
    style = type("Kind", (Computed,), {"kind": kind})
    assert_equal(fit(style, strategy()), fit(style))
