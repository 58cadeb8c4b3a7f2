"""Ensembles of modules that `torch.vmap` calls together, inside of blocks and outside."""

import copy
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from lightning_shard import ConfigError
from tests.strategies.decoders import WIDTH as DECODER_WIDTH
from tests.strategies.decoders import Decoder, DecoderBlock, fit_decoder
from tests.strategies.decoders import assert_as_alone as assert_decoder_as_alone
from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import Block, fit

pytestmark = ignoring(
    ".*microbatches are fewer than the", "A step uses .* parameters outside of their stage"
)
alone: Any = cache(fit)


def mean_of(members: nn.ModuleList, x: Tensor) -> Tensor:
    params, buffers = stack_module_state([*members])
    base = copy.deepcopy(members[0]).to("meta")

    def call(params: Any, buffers: Any) -> Any:
        return functional_call(base, (params, buffers), (x,))

    each: Tensor = torch.vmap(call)(params, buffers)
    return each.mean(0)


class Members(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Block()
        self.members = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + mean_of(self.members, x)


class InBlocks(OfRanks):
    options: ClassVar[dict[str, Any]] = {"max_epochs": 1}
    block = Members


class OfBlocks(OfRanks):
    def loss(self, batch: Any) -> Tensor:
        x = mean_of(self.blocks, self.embed(batch[0]))
        return F.cross_entropy(self.head(x), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["pipeline", "hybrid", "zero3"])
def test_an_ensemble_in_a_block(scheme: str) -> None:
    """What stands for a weight was no parameter to `Module.to`: "param must be a Parameter"."""
    num_ranks, make = SCHEMES[scheme]
    got = fit(InBlocks, make(), devices=num_ranks)
    torch.testing.assert_close(got.weights, alone(InBlocks).weights, rtol=1e-5, atol=1e-5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["pipeline", "hybrid"])
def test_an_ensemble_of_blocks_is_refused_by_name(scheme: str) -> None:
    num_ranks, make = SCHEMES[scheme]
    with pytest.raises(ConfigError, match=r"A block of a pipeline is computed inside torch\.func"):
        fit(OfBlocks, make(), devices=num_ranks)


class ByRow(DecoderBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(lambda row: self.attention(row.unsqueeze(0)).squeeze(0))(x)


class ByMember(DecoderBlock):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(DECODER_WIDTH, DECODER_WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + mean_of(self.members, x)


class RowByRow(Decoder):
    block = ByRow


class MemberByMember(Decoder):
    block = ByMember


@pytest.mark.slow
def test_a_block_of_a_shared_sequence_is_called_by_vmap_or_refused_by_name() -> None:
    """Rows are as on one device; weights of several members met a batching rule that is missing."""
    assert_decoder_as_alone(RowByRow, "context")
    with pytest.raises(ConfigError, match="another of torch's function transforms"):
        fit_decoder(MemberByMember, "context")
