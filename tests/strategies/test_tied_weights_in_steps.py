"""A weight in two places is one parameter to all user code, as on one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_shard import ContextParallelStrategy, HybridParallelStrategy, TensorParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import WIDTH, UpAndDown, fit

pytestmark = ignoring(".*parameters outside of their stage", "enable_nested_tensor")
VOCABULARY = 12
EVERY: dict[str, tuple[int, Callable[[], Any]]] = {
    **SCHEMES,
    "tensor": (2, lambda: TensorParallelStrategy(backend="in_process")),
    "tensor_zero3": (
        4,
        lambda: HybridParallelStrategy(backend="in_process", tensor_parallel_size=2, zero_stage=3),
    ),
    "context": (2, lambda: ContextParallelStrategy(backend="in_process", context_parallel_size=2)),
}


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


class Tied(OfRanks):
    """Its embedding is its head, and its loss has a penalty over all parameters."""

    block: Any = UpAndDown

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(*torch.randint(0, VOCABULARY, (2, 36, 4), generator=generator))

    def check(self) -> None:
        assert self.head.weight is self.embed.weight
        named = dict(self.named_parameters())
        assert "head.weight" not in named
        assert named["embed.weight"] is self.head.weight
        assert self.head.weight in {*self.parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.check()
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        return loss + 1e-2 * sum(param.square().sum() for param in self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.check()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.check()

    def on_validation_epoch_start(self) -> None:
        self.check()


class TiedBesideAttention(Tied):
    block = staticmethod(attention)


alone = cache(lambda style: fit(style).weights)


def assert_as_alone(style: type[Tied], scheme: str) -> None:
    num_ranks, make = EVERY[scheme]
    got = fit(style, make(), devices=num_ranks).weights
    torch.testing.assert_close(got, alone(style), rtol=1e-5, atol=2e-6)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3", "pipeline", "zero3", "hybrid"])
def test_a_penalty_over_all_parameters_has_a_tied_weight_once(scheme: str) -> None:
    """Under tensor parallel a step saw two parameters, and counted the weight twice."""
    assert_as_alone(Tied, scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["context", "pipeline", "zero3"])
def test_a_penalty_has_a_tied_weight_once_beside_attention(scheme: str) -> None:
    """A tie is one parameter to a step also where ranks share blocks with attention."""
    assert_as_alone(TiedBesideAttention, scheme)
