"""Cross entropy of classes in parts: torch's values and gradients, and what is sent and kept."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_operations import (
    LossOptions,
    parallel_cross_entropy,
)
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

NUM_CLASSES, NUM_ROWS = 12, 7
WEIGHT = torch.linspace(0.5, 2, NUM_CLASSES, dtype=torch.double)
OPTIONS = [
    LossOptions(reduction=reduction, weight=weight, label_smoothing=smoothing, ignore_index=index)
    for reduction in ("none", "mean", "sum")
    for weight in (None, WEIGHT)
    for smoothing in (0.0, 0.1)
    for index in (-100, 3)
]


def problem(dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    """Return logits of shape (rows, classes) and targets, some of them -100 and some 3."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, NUM_CLASSES, generator=generator, dtype=torch.double) * 5
    return logits.to(dtype), torch.tensor([0, 3, 11, -100, 5, 3, 6])


def loss_of(logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    return F.cross_entropy(
        logits,
        target,
        options.weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )


def own_part(logits: Tensor, group: Collectives) -> Tensor:
    return logits.chunk(group.size, -1)[group.rank].clone().requires_grad_()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torch(num_ranks: int, options: LossOptions) -> None:
    logits, target = problem()
    if options.ignore_index == 3:
        target = target.where(target >= 0, 3)
    logits.requires_grad_()
    expected = loss_of(logits, target, options)
    grad_of_loss = torch.linspace(1, 2, expected.numel(), dtype=torch.double).view_as(expected)
    expected.backward(grad_of_loss)
    assert logits.grad is not None
    full_grad = logits.grad

    def fn(rank: int) -> None:
        group = all_ranks()
        local = own_part(logits.detach(), group)
        loss = parallel_cross_entropy(local, target, options, group)
        loss.backward(grad_of_loss)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(local.grad, full_grad.chunk(num_ranks, -1)[rank])

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_of_narrow_logits_it_is_as_exact_as_torch(dtype: torch.dtype, autocast: bool) -> None:
    logits, target = problem(dtype)
    exact = F.cross_entropy(logits.double(), target)

    def fn(rank: int) -> None:
        group = all_ranks()
        local = own_part(logits, group)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = parallel_cross_entropy(local, target, LossOptions(), group)
            assert loss.dtype == F.cross_entropy(logits, target).dtype
        torch.testing.assert_close(loss, exact.to(loss.dtype))
        loss.backward()
        assert local.grad is not None
        assert local.grad.dtype == dtype

    run_ranks(fn, 2)


def test_extreme_logits_stay_finite() -> None:
    rows = [[1e4, -1e4, 0.0, 9999.0], [-1e4, -1e4, -1e4, -1e4], [1.0, 2.0, -torch.inf, -torch.inf]]
    logits, target = torch.tensor(rows, dtype=torch.double), torch.tensor([3, 0, 1])
    expected_grad = torch.func.grad(F.cross_entropy)(logits, target)

    def fn(rank: int) -> None:
        group = all_ranks()
        local = own_part(logits, group)
        loss = parallel_cross_entropy(local, target, LossOptions(), group)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))
        loss.backward()
        torch.testing.assert_close(local.grad, expected_grad.chunk(2, -1)[rank])

    run_ranks(fn, 2)


def test_three_numbers_per_row_are_sent_and_only_the_own_part_is_saved() -> None:
    logits, target = problem(torch.float32)

    def fn(rank: int) -> None:
        group = all_ranks()
        local = own_part(logits, group)
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = parallel_cross_entropy(local, target, LossOptions(), group)
        loss.backward()
        assert set(group.traffic) == {"all_gather"}
        assert group.traffic["all_gather"].elements == 3 * NUM_ROWS  # to the one other rank
        wide = [tensor for tensor in saved if tensor.ndim > 1]
        assert [tensor.data_ptr() for tensor in wide] == [local.data_ptr()]

    run_ranks(fn, 2)


def test_a_target_out_of_range_is_refused_on_every_rank() -> None:
    def fn(rank: int) -> None:
        group = all_ranks()
        local = own_part(problem()[0], group)
        target = torch.full((NUM_ROWS,), NUM_CLASSES)
        with pytest.raises(ConfigError, match="targets from 12 to 12, expected 0 to 11"):
            parallel_cross_entropy(local, target, LossOptions(), group)
        with pytest.raises(ConfigError, match=r"logits for \(7,\) and targets of shape \(6,\)"):
            parallel_cross_entropy(local, target[1:], LossOptions(), group)

    run_ranks(fn, 2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_is_no_constant_to_a_second_derivative(options: LossOptions) -> None:
    """`once_differentiable` raises no error where the gradient that comes in is a constant."""
    logits, target = problem()
    if options.ignore_index == 3:
        target = target.where(target >= 0, 3)
    logits = (logits / 5).requires_grad_()
    start = torch.linspace(1, 2, loss_of(logits, target, options).numel(), dtype=torch.double)

    def second(loss: Tensor, source: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        (grad,) = torch.autograd.grad(loss, source, factor.view_as(loss), create_graph=True)
        return grad.pow(3).sum(), factor

    factor = start.clone().requires_grad_()
    second(loss_of(logits, target, options), logits, factor)[0].backward()
    assert logits.grad is not None
    of_logits, of_factor = logits.grad, factor.grad

    def fn(rank: int) -> None:
        group = all_ranks()
        local, own_factor = own_part(logits.detach(), group), start.clone().requires_grad_()
        loss = parallel_cross_entropy(local, target, options, group)
        second(loss, local, own_factor)[0].backward()  # of this rank's summand
        torch.testing.assert_close(local.grad, of_logits.chunk(2, -1)[rank])
        torch.testing.assert_close(own_factor.grad, of_factor)

    run_ranks(fn, 2)
