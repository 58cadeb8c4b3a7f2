"""What is dropped after torch's attention is what a single device drops, in any layout."""

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks


def encoder(batch_first: bool) -> nn.Module:
    """Drops outside of its regions only."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=batch_first)
    layer.dropout.p = layer.self_attn.dropout = 0.0
    return nn.ModuleDict({"layer": layer}).double()


def run(model: nn.Module) -> Tensor:
    x = torch.randn(8, 8, 16, generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(2)
    result: Tensor = model["layer"](model["layer"](x))
    return result * 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zeros_after_torch_s_attention_are_drawn_in_its_order(
    num_ranks: int, batch_first: bool, sequence_parallel: bool
) -> None:
    """Zeros after torch's attention were drawn in another order."""
    expected = run(encoder(batch_first))

    def fn(rank: int) -> None:
        model = encoder(batch_first)
        layers = automatic_plan(model, num_ranks)
        SplitModel(model, layers, all_ranks(), sequence_parallel=sequence_parallel)
        torch.testing.assert_close(run(model) + torch.zeros(8, 8, 16), expected)

    run_ranks(fn, num_ranks)
