"""Models whose blocks are `nn.Sequential`s of different modules, called as a whole or in parts."""

import pytest
from torch import Tensor, nn

from lightning_shard import ConfigError
from tests.strategies.decoders import (
    DECODER_SCHEMES,
    WIDTH,
    Attention,
    Decoder,
    assert_as_alone,
    fit_decoder,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring(".*microbatches are fewer than the")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class OfSequences(Decoder):
    def build(self) -> None:
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), Attention(), Pair()) for _ in range(2)
        )


class InParts(OfSequences):
    def hidden(self, x: Tensor) -> Tensor:
        for norm, attention, pair in self.blocks:
            x = pair(x + attention(norm(x)))
        return self.norm(x)


class OfLists(InParts):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(nn.ModuleList(block) for block in self.blocks)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", DECODER_SCHEMES)
def test_sequences_were_no_blocks_of_context_parallel(scheme: str) -> None:
    assert_as_alone(OfSequences, scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", DECODER_SCHEMES)
@pytest.mark.parametrize("style", [InParts, OfLists])
def test_blocks_whose_parts_are_called(style: type[Decoder], scheme: str) -> None:
    if scheme in ("shard_ddp", "zero2", "zero3", "tensor", "tensor_zero3"):
        assert_as_alone(style, scheme)
    else:  # sequences are cut, and stages left, where blocks are called
        with pytest.raises(ConfigError, match="blocks"):
            fit_decoder(style, scheme)
