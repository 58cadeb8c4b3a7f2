"""Ranks that update on their own, or compress, have the same bits with checkpoints as without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_shard import AsyncSGDStrategy, DDPStrategy, LocalSGDStrategy, ZeRO2Strategy
from tests.strategies.parity import Run, build, ignoring, train

pytestmark = ignoring()

RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}
STRATEGIES: dict[str, Callable[..., Any]] = {
    "local_sgd": lambda **one: LocalSGDStrategy(sync_every=2, warmup_steps=0, **RANKS, **one),
    "async_sgd": lambda **one: AsyncSGDStrategy(staleness_bound=0, **RANKS, **one),
    "top-k": lambda **one: DDPStrategy(compression="topk", **RANKS, **one),
    "int8": lambda **one: ZeRO2Strategy(compression="int8", **RANKS, **one),
}


def trained(strategy: Any) -> Run:
    return train(build("gpt"), num_steps=5, strategy=strategy, devices=2)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_bits_with_and_without(name: str) -> None:
    make = STRATEGIES[name]
    plain, again = trained(make()), trained(make(activation_checkpointing="full"))
    assert again.losses == plain.losses
    torch.testing.assert_close(again.weights, plain.weights, rtol=0, atol=0)
