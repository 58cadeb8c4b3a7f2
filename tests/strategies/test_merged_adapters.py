"""Adapters that hooks merge into their frozen layers, for a while or for good, as peft does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError
from tests.strategies.decoders import DECODER_SCHEMES, Decoder, assert_as_alone, fit_decoder
from tests.strategies.parity import ignoring

pytestmark = ignoring(".*microbatches are fewer than the")


IN_SHARDS_AND_STAGES = "2x2x2_zero3"


class Adapted(nn.Module):
    """A frozen layer and a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 10)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 10)
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y if self.is_merged else y + x @ self.down.T @ self.up.T

    def merge(self) -> None:
        self.base.weight.data += (self.up @ self.down).detach()
        self.is_merged = True

    def unmerge(self) -> None:
        self.base.weight.data -= (self.up @ self.down).detach()
        self.is_merged = False


class MergesForAWhile(Decoder):
    """Looks at what the merged layers compute at the end of each epoch."""

    def build(self) -> None:
        for block in self.blocks:
            block.up = Adapted(block.up)  # type: ignore[arg-type]

    def on_train_epoch_end(self) -> None:
        for block in self.blocks:
            block.up.merge()  # type: ignore[union-attr,operator]
        with torch.no_grad():
            seen = float(self(torch.zeros(2, 6, dtype=torch.long)).sum())
            self.head.bias += seen / 1000
        for block in self.blocks:
            block.up.unmerge()  # type: ignore[union-attr,operator]


class MergesForGood(MergesForAWhile):
    """Leaves plain layers."""

    def on_train_epoch_end(self) -> None:
        pass

    def on_train_end(self) -> None:
        for block in self.blocks:
            adapted: Any = block.up
            adapted.merge()
            block.up = adapted.base


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", [one for one in DECODER_SCHEMES if one != IN_SHARDS_AND_STAGES])
@pytest.mark.parametrize("style", [MergesForAWhile, MergesForGood])
def test_merging_adapters_in_hooks_is_a_single_devices(style: type[Decoder], scheme: str) -> None:
    assert_as_alone(style, scheme)


def test_merging_adapters_in_shards_of_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reads elements of 'blocks\.0\.up\.up' outside"):
        fit_decoder(MergesForAWhile, IN_SHARDS_AND_STAGES)
