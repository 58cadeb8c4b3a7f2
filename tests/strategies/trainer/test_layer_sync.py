"""Against one batch norm over the whole batch, uneven batches included."""

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.strategies.trainer.layer_sync import sync_batch_norm
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

SHAPES = {"1d": (7, 3), "sequence": (7, 3, 5), "2d": (7, 3, 4, 2)}
CUTS = [(0, 4), (4, 6), (6, 7)]


KINDS = {"1d": nn.BatchNorm1d, "sequence": nn.BatchNorm1d, "2d": nn.BatchNorm2d}


def norm(
    momentum: float | None = 0.1, affine: bool = True, shape: str = "2d"
) -> nn.BatchNorm1d | nn.BatchNorm2d:
    module = KINDS[shape](3, momentum=momentum, affine=affine)
    if affine:
        with torch.no_grad():
            module.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
    return module


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_equals_the_full_batch(shape: str, momentum: float | None, affine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(SHAPES[shape], generator=generator) * 3 + 50
    weights = torch.randn(SHAPES[shape], generator=generator)

    full, expected_in = norm(momentum, affine, shape), batch.clone().requires_grad_()
    expected = nn.functional.batch_norm(
        expected_in, None, None, full.weight, full.bias, training=True
    )
    (expected * weights).sum().backward()

    def fn(rank: int) -> tuple[Tensor, Tensor, nn.Module]:
        collectives = all_ranks()
        module, part = norm(momentum, affine, shape), slice(*CUTS[rank])
        mine = batch[part].clone().requires_grad_()
        out = sync_batch_norm(module, mine, collectives)
        (out * weights[part]).sum().backward()
        assert mine.grad is not None
        return out.detach(), mine.grad, module

    results = [result for result in run_ranks(fn, 3) if result is not None]
    torch.testing.assert_close(torch.cat([out for out, _, _ in results]), expected.detach())
    torch.testing.assert_close(
        torch.cat([grad for _, grad, _ in results]), expected_in.grad, rtol=1e-3, atol=1e-4
    )
    running = nn.BatchNorm1d(3, momentum=momentum)
    running(batch.movedim(1, -1).reshape(-1, 3))
    for _, _, module in results:
        torch.testing.assert_close(module.running_mean, running.running_mean)
        torch.testing.assert_close(module.running_var, running.running_var)
    if affine:
        assert full.weight.grad is not None
        summed = sum(module.weight.grad for _, _, module in results)
        torch.testing.assert_close(summed, full.weight.grad, rtol=1e-4, atol=1e-4)


def test_narrow_types_keep_theirs() -> None:
    def fn(rank: int) -> torch.dtype:
        collectives = all_ranks()
        batch = torch.randn(4, 3, 2, 2, dtype=torch.bfloat16)
        return sync_batch_norm(norm(), batch, collectives).dtype

    assert run_ranks(fn, 2) == [torch.bfloat16] * 2


def test_a_batch_of_the_wrong_shape_is_refused() -> None:
    """A batch of the wrong shape was normalised."""

    def fn(rank: int) -> None:
        collectives = all_ranks()
        sync_batch_norm(norm(shape="2d"), torch.randn(4, 3), collectives)

    with pytest.raises(ValueError, match="expected 4D input"):
        run_ranks(fn, 2)


def test_a_penalty_of_gradients_is_that_of_the_full_batch() -> None:
    """Second derivatives left out what comes through the statistics of other ranks' samples."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(7, 3, generator=generator, dtype=torch.float64)

    def penalty(given: Tensor, out: Tensor) -> Tensor:
        loss = out.tanh().pow(3).sum()
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        return loss + slope.square().sum()

    full, expected_in = norm(shape="1d").double(), batch.clone().requires_grad_()
    penalty(expected_in, full(expected_in)).backward()

    def fn(rank: int) -> tuple[Tensor, Tensor]:
        collectives = all_ranks()
        module = norm(shape="1d").double()
        mine = batch[slice(*CUTS[rank])].clone().requires_grad_()
        penalty(mine, sync_batch_norm(module, mine, collectives)).backward()
        assert mine.grad is not None
        assert module.weight.grad is not None
        return mine.grad, module.weight.grad

    results = [result for result in run_ranks(fn, 3) if result is not None]
    torch.testing.assert_close(torch.cat([grad for grad, _ in results]), expected_in.grad)
    torch.testing.assert_close(sum(grad for _, grad in results), full.weight.grad)
