"""The crossings of regions: differentiated twice, as a gradient penalty does, and their bytes."""

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

PLANS = [
    {"0": "colwise", "2": "rowwise"},
    {"0": "colwise_gather_output", "2": "rowwise_split_input"},
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_penalty_has_all_of_the_second_derivative(
    plan: dict[str, str], sequence_parallel: bool, num_ranks: int
) -> None:
    """A gradient penalty had only each rank's part of the second derivative."""

    def penalty(model: nn.Module) -> Tensor:
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).double()
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()).double()

    def fn(rank: int) -> None:
        full, model = make(), make()
        expected = penalty(full)
        expected.backward()
        layers = match_plan(model, plan)
        split = SplitModel(model, layers, all_ranks(), sequence_parallel=sequence_parallel)
        loss = penalty(model)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for param, reference in zip(model.parameters(), full.parameters(), strict=True):
            if reference.grad is not None:
                assert param.grad is not None
                torch.testing.assert_close(split.full(param, param.grad), reference.grad)

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize(
    ("kind", "num_bytes"), [(torch.bfloat16, 2), (torch.float16, 4), (None, 4)]
)
def test_gradients_of_layers_in_bfloat16_travel_in_bfloat16(
    kind: torch.dtype | None, num_bytes: int
) -> None:
    """Gradients of layers in bfloat16 travelled in float32."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def fn(rank: int) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        group = all_ranks()
        SplitModel(model, match_plan(model, {"0": "colwise", "1": "rowwise"}), group)
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=kind or torch.bfloat16, enabled=kind is not None):
            loss = model(own).float().square().sum()
        group.traffic.reset()
        loss.backward()
        assert own.grad is not None
        return group.traffic.snapshot()["all_reduce"].bytes, own.grad

    torch.manual_seed(0)
    model, alone = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), x.clone().requires_grad_()
    model(alone).square().sum().backward()
    for sent, grad in run_ranks(fn, 2):
        assert sent == num_bytes * x.numel()  # of two ranks each sends as much as it has
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, alone.grad, rtol=0.02, atol=0.05)
