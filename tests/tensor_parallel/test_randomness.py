"""Random numbers differ within a region and agree outside, whatever recomputes or resumes."""

from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.checkpoint.random_state import share_random_state
from lightning_shard.strategies.model_parallel import TensorParallelStrategy
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()

PLAN = {"*.qkv": "packed_colwise(3)", "*.out": "rowwise", "*.up": "colwise", "*.down": "rowwise"}
RATE = 0.5


class Block(nn.Module):
    """Attention and feed-forward, with dropout within both and outside; records the zeros."""

    def __init__(self, width: int = 16, rate: float = RATE) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout_rate, self.dropout = rate, nn.Dropout(rate)
        self.inside: list[Tensor] = []
        self.outside: list[Tensor] = []
        self.attention: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        rate = self.dropout_rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        same = torch.ones_like(query)  # each head attends alike, but for the dropout
        self.attention.append(F.scaled_dot_product_attention(same, same, same, dropout_p=rate))
        x = x + self._drop(self.out(mixed.transpose(1, 2).flatten(2)), self.outside)
        x = x + self.down(self._drop(F.gelu(self.up(x)), self.inside))
        return self._drop(x, self.outside)

    def _drop(self, x: Tensor, record: list[Tensor]) -> Tensor:
        x = self.dropout(x)
        record.append(x.detach() == 0)
        return x


def split_block(**options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList([Block(**options)])
    SplitModel(model, match_plan(model, PLAN), all_ranks())
    torch.manual_seed(1)
    return model


def x_of(batch: int = 2) -> Tensor:
    return torch.linspace(-1, 1, batch * 8 * 16).view(batch, 8, 16)


def test_zeros_differ_within_a_region_and_agree_outside() -> None:
    def fn(rank: int) -> Block:
        (block,) = split_block()
        block(x_of())
        assert isinstance(block, Block)
        return block

    first, second = run_ranks(fn, 2)
    assert first is not None
    assert second is not None
    assert not torch.equal(first.inside[0], second.inside[0])
    assert not torch.equal(first.attention[0], second.attention[0])
    for own, other in zip(first.outside, second.outside, strict=True):
        assert torch.equal(own, other)
        assert 0.3 < own.float().mean() < 0.7
    assert not torch.equal(*first.outside)


def test_zeros_outside_do_not_depend_on_the_number_of_ranks() -> None:
    def fn(rank: int) -> list[Tensor]:
        (block,) = split_block()
        block(x_of())
        outside: list[Tensor] = block.outside
        return outside

    two, four = run_ranks(fn, 2)[1], run_ranks(fn, 4)[3]
    assert two is not None
    assert four is not None
    for own, other in zip(two, four, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_activations_recomputes_the_same_zeros(reentrant: bool) -> None:
    def fn(rank: int) -> None:
        gradients = []
        for is_checkpointed in (False, True):
            (block,) = split_block()
            x = x_of().requires_grad_()
            for _ in range(3):  # of which each recomputation but the last may end early
                y = checkpoint(block, x, use_reentrant=reentrant) if is_checkpointed else block(x)
                (y * y).sum().backward()
            gradients.append([x.grad, *(param.grad for param in block.parameters())])
        for own, other in zip(*gradients, strict=True):
            assert own is not None
            assert torch.equal(own, other)

    run_ranks(fn, 2)


def test_a_recomputation_that_ends_within_a_region_ends_its_stream() -> None:
    def inside(block: Any, x: Tensor) -> Tensor:
        return block.down(block.dropout(block.up(x).relu()).tanh())

    def fn(rank: int) -> None:
        common = []
        for is_checkpointed in (False, True):
            (block,) = split_block()
            x = x_of().requires_grad_()
            for _ in range(2):
                if is_checkpointed:
                    y = checkpoint(inside, block, x, use_reentrant=False)
                else:
                    y = inside(block, x)
                y.sum().backward()
            common.append(torch.get_rng_state())
        assert torch.equal(*common)

    run_ranks(fn, 2)


def test_a_step_from_a_saved_random_state_is_the_same_step() -> None:
    def fn(rank: int) -> None:
        (block,) = split_block()
        block(x_of())
        state = torch.get_rng_state()
        results = []
        for _ in range(2):
            torch.set_rng_state(state)
            results.append((block(x_of()), block(x_of())))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert not torch.equal(*results[0])

    run_ranks(fn, 2)


@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (RATE, False)])
def test_without_dropout_nothing_is_drawn(rate: float, training: bool) -> None:
    def fn(rank: int) -> None:
        model = split_block(rate=rate).train(training)
        before = torch.get_rng_state()
        model[0](x_of())
        assert torch.equal(torch.get_rng_state(), before)

    run_ranks(fn, 2)


def test_the_random_state_of_rank_0_becomes_that_of_all() -> None:
    def fn(rank: int) -> tuple[float, float]:  # run_ranks has seeded each with its number
        share_random_state(all_ranks(), torch.device("cpu"))
        return float(torch.rand(())), float(np.random.rand())

    first, second = run_ranks(fn, 2)
    assert first == second


class UnlikeOnRanks(L.LightningModule):
    """Makes its layers where each rank has random numbers of its own."""

    def configure_model(self) -> None:
        if not hasattr(self, "block"):
            torch.manual_seed(self.trainer.strategy.mesh_rank)
            self.block = Block(rate=0.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.drawn = torch.rand(())
        loss: Tensor = self.block(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_size_starts_from_the_weights_of_rank_0(size: int) -> None:
    torch.manual_seed(0)
    expected = Block().state_dict()
    model = UnlikeOnRanks()
    plan = {f"block.{name.removeprefix('*.')}": style for name, style in PLAN.items()}
    strategy = TensorParallelStrategy(backend="in_process", tensor_parallel_size=size, plan=plan)
    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=1, accumulate_grad_batches=1)
    trainer.fit(model, DataLoader(TensorDataset(x_of(4)), batch_size=4, shuffle=False))
    for name, value in model.block.state_dict().items():
        assert torch.equal(value, expected[name]), name
