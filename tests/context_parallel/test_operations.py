"""Losses of a sequence in parts equal those of the full one, and no rank has all of its logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, full_tensor
from lightning_shard.testing import run_ranks
from tests.context_parallel.test_attention import drawn, in_parts, mean
from tests.context_parallel.test_cut_blocks import BATCH, WIDTH, Blocks, gpt_block
from tests.groups import all_ranks

LENGTH, NUM_CLASSES = 12, 7
WEIGHT = torch.linspace(0.5, 2.0, NUM_CLASSES)
Loss = Callable[[Tensor, Tensor], Tensor]


def labels(length: int = LENGTH) -> Tensor:
    found = torch.randint(NUM_CLASSES, (BATCH, length), generator=torch.Generator().manual_seed(3))
    found[0, 1] = found[1, -1] = -100
    return found


def flat(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.reshape(-1, NUM_CLASSES), y.reshape(-1), **options)


def shifted(x: Tensor, y: Tensor) -> Tensor:
    return flat(x[:, :-1], y[:, 1:])


LOSSES: dict[str, Loss] = {
    "mean": flat,
    "weighted, smooth": lambda x, y: flat(x, y, weight=WEIGHT, label_smoothing=0.2),
    "sum": lambda x, y: flat(x, y, reduction="sum") / 10,
    "rows": lambda x, y: (flat(x, y, reduction="none") * torch.arange(y.numel())).sum() / 10,
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes second, rows": lambda x, y: F.cross_entropy(
        x.transpose(1, 2), y, reduction="none"
    ).mean(),
    "shifted": shifted,
    "shifted, an ellipsis": lambda x, y: flat(x[..., :-2, :].contiguous(), y[..., 2:]),
    "log-softmax": lambda x, y: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), y.flatten()),
    "in float64": lambda x, y: flat(x.double(), y).float(),
    "a mean of squares": lambda x, y: x.square().mean() + x[:, :-1].sum() / 10,
    "a mean of positions": lambda x, y: (
        x.mean(1).square().sum() + x.sum((1, 2), keepdim=True).mean()
    ),
    "another loss": lambda x, y: F.mse_loss(x, torch.ones_like(x)),
    "of each class": lambda x, y: (
        F.binary_cross_entropy_with_logits(
            x, F.one_hot(y.clamp_min(0), NUM_CLASSES).float(), pos_weight=WEIGHT, reduction="sum"
        )
        / 10
    ),
    "a teacher's": lambda x, y: F.kl_div(
        F.log_softmax(x[:, :-1], -1), x.detach()[:, :-1].cos().softmax(-1), reduction="batchmean"
    ),
    "hits": lambda x, y: x.sum() / 10 + (x.argmax(-1) == y).float().mean(),
    "other classes": lambda x, y: x.sum(-1).square().mean(),
}


@pytest.mark.parametrize("length", [LENGTH, 11, 13, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_it_equals_that_of_the_full_sequence_and_nothing_is_gathered(
    name: str, length: int
) -> None:
    x, y = drawn(BATCH, length, NUM_CLASSES), labels(length)
    expected = LOSSES[name](x, y)
    (expected_grad,) = torch.autograd.grad(expected, x)

    def of_rank(rank: int) -> tuple[Tensor, Tensor, set[str]]:
        own = x.detach().requires_grad_()
        (part,), _ = in_parts([own], 1)
        traffic = part._part.group.traffic
        before = traffic.snapshot()
        loss = LOSSES[name](part, y)
        after = traffic.snapshot()
        used = {one for one in after if after[one] != before.get(one)}
        assert not isinstance(loss, DimShardedTensor)
        (grad,) = torch.autograd.grad(loss, own)
        return loss.detach(), mean(grad.contiguous()), used

    for loss, grad, used in run_ranks(of_rank, 4):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)
        assert used == {"all_reduce"}


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x, y: x[:, 0].sum(), id="the first position"),
        pytest.param(lambda x, y: x[:, 1:].square().sum(), id="but the first"),
        pytest.param(lambda x, y: x[:, ::2].square().sum(), id="every second"),
        pytest.param(lambda x, y: x[torch.tensor([1, 0])].square().sum(), id="samples"),
        pytest.param(lambda x, y: x[y >= 0].square().sum(), id="those with labels"),
        pytest.param(lambda x, y: x.amax(1).sum(), id="the largest"),
        pytest.param(
            lambda x, y: F.mse_loss(
                x, torch.ones_like(x), weight=torch.arange(x.numel()).view(x.shape)
            ),
            id="another loss by weight",
        ),
        pytest.param(
            lambda x, y: x.reshape(-1, 3, NUM_CLASSES).mean(1).square().sum(), id="pooled"
        ),
        pytest.param(
            lambda x, y: F.cross_entropy(x, torch.zeros(BATCH, NUM_CLASSES, dtype=torch.long)),
            id="positions as classes",
        ),
    ],
)
def test_what_needs_other_positions_is_right_too(use: Loss) -> None:
    x, y = drawn(BATCH, LENGTH, NUM_CLASSES), labels()
    expected = use(x, y)
    (expected_grad,) = torch.autograd.grad(expected, x)

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        own = x.detach().requires_grad_()
        (part,), in_full = in_parts([own], 1)
        in_full.block = None  # as after the blocks
        loss = full_tensor(use(part, y))
        (grad,) = torch.autograd.grad(loss, own)
        return loss.detach(), mean(grad.contiguous())

    for loss, grad in run_ranks(of_rank, 4):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


class WithHead(Blocks):
    def __init__(self) -> None:
        super().__init__(gpt_block)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        logits = self.head(self.norm(super().forward(x, **options)))
        self.seen.append(logits)
        return logits


def test_a_training_step_has_its_own_logits_and_evaluation_all() -> None:
    x = drawn(BATCH, LENGTH, WIDTH).detach()
    model = WithHead()
    loss = shifted(model(x), labels())
    expected = torch.autograd.grad(loss, list(model.parameters()))

    def of_rank(rank: int) -> tuple[Tensor, list[Tensor], list[Any]]:
        model, ranks = WithHead(), all_ranks()
        CutBlocks(model, ranks)
        loss = shifted(model(x), labels())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        model.eval()
        with torch.no_grad():
            model(x)
        own, all_of_it = model.seen
        assert not isinstance(all_of_it, DimShardedTensor)
        sizes = [own._part.local.numel(), all_of_it.numel()]
        return loss.detach(), [mean(one.contiguous()) for one in grads], sizes

    full = BATCH * LENGTH * NUM_CLASSES
    for found, grads, sizes in run_ranks(of_rank, 4):
        torch.testing.assert_close(found, loss.detach())
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert sizes == [full // 4, full]
