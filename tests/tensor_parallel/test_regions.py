"""The crossings of regions can be differentiated twice, as a gradient penalty does."""

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.tensor_parallel.test_split import group_of_all

PLANS = [
    {"0": "colwise", "2": "rowwise"},
    {"0": "colwise_gather_output", "2": "rowwise_split_input"},
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_penalty_had_only_each_rank_s_part_of_the_second_derivative(
    plan: dict[str, str], sequence_parallel: bool, num_ranks: int
) -> None:
    def penalty(model: nn.Module) -> Tensor:
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).double()
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()).double()

    def fn(rank: int) -> None:
        whole, model = make(), make()
        expected = penalty(whole)
        expected.backward()
        layers = match_plan(model, plan)
        split = SplitModel(model, layers, group_of_all(), sequence_parallel=sequence_parallel)
        loss = penalty(model)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for param, reference in zip(model.parameters(), whole.parameters(), strict=True):
            if reference.grad is not None:
                assert param.grad is not None
                torch.testing.assert_close(split.whole(param, param.grad), reference.grad)

    run_ranks(fn, num_ranks)
