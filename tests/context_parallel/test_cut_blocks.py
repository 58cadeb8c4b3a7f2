"""Blocks get parts of the sequence: what is sent and kept, stays full, and is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from examples.train_gpt import Block
from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, full_tensor
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

BATCH, LENGTH, WIDTH, HEADS, NUM_BLOCKS = 2, 16, 16, 8, 3


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **options)
        return x


class Convolved(nn.Module):
    """Mixes neighbours, has a pooled gate, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + mixed * torch.sigmoid(self.gate(x.mean(1, keepdim=True)))


class Recurrent(nn.Module):
    """Goes through the positions one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class LookingBehind(nn.Module):
    """Finds that it is given a part, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if isinstance(x, DimShardedTensor) else 1)


def gpt_block() -> nn.Module:
    return Block(WIDTH, HEADS)


def inputs(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, length, WIDTH, generator=generator, requires_grad=True)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the result and every gradient of a loss that looks at all positions differently."""
    y = full_tensor(model(x))
    loss = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() + y.square().mean()
    return [y.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("make", "needing_all"),
    [
        pytest.param(gpt_block, set(), id="the example's"),
        pytest.param(Convolved, {"conv1d"}, id="convolutions"),
        pytest.param(Recurrent, {"gru"}, id="a recurrence"),
    ],
)
@pytest.mark.parametrize("length", [LENGTH, 15, 13, 5])
@pytest.mark.filterwarnings("ignore:The block .* which has no rule")
def test_results_and_gradients_are_those_of_the_full_sequence(
    make: Callable[[], nn.Module], needing_all: set[str], length: int
) -> None:
    """Of any length: 4 ranks have 2 positions each of 5, the last one two copies of the last."""
    expected = results(Blocks(make), inputs(length))

    def of_rank(rank: int) -> tuple[list[Tensor], set[str]]:
        model, ranks = Blocks(make), all_ranks()
        cut = CutBlocks(model, ranks)
        y, of_input, *grads = results(model, inputs(length))
        for grad in grads:
            ranks.all_reduce(grad)
        return [y, of_input, *(grad / ranks.size for grad in grads)], set(cut.in_full.noted)

    for found, noted in run_ranks(of_rank, 4):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert noted == needing_all


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_sent_is_four_exchanges_a_block_and_a_gather_each_way(num_ranks: int) -> None:
    def of_rank(rank: int) -> dict[str, int]:
        model, ranks = Blocks(gpt_block), all_ranks()
        CutBlocks(model, ranks)
        results(model, inputs())  # blocks are tried
        before = ranks.traffic.snapshot()
        results(model, inputs())
        after = ranks.traffic.snapshot()
        return {
            name: one.elements - (before[name].elements if name in before else 0)
            for name, one in after.items()
        }

    own = BATCH * LENGTH * WIDTH // num_ranks
    away = num_ranks - 1
    expected = {  # query, key, value and the result, forward and backward
        "all_to_all": NUM_BLOCKS * 2 * 4 * own * away // num_ranks,
        "all_gather": 2 * own * away,
    }
    for sent in run_ranks(of_rank, num_ranks):
        assert {name: count for name, count in sent.items() if count} == expected


def saved_bytes(num_ranks: int, length: int) -> int:
    """Return the bytes that the blocks keep for backward on rank 0."""

    def of_rank(rank: int) -> int:
        model, ranks = Blocks(gpt_block), all_ranks()
        if ranks.size > 1:
            CutBlocks(model, ranks)
            model(inputs(length))
        params = {param.untyped_storage().data_ptr() for param in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in params and not isinstance(tensor, DimShardedTensor):
                kept[memory.data_ptr()] = memory.nbytes()
            held.append(tensor)
            return tensor

        held: list[Tensor] = []
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            model(inputs(length))
        return sum(kept.values())

    return run_ranks(of_rank, num_ranks)[0]


def test_activations_for_backward_fall_as_the_ranks_rise() -> None:
    """Attention's result is kept twice, with own heads and with own positions."""
    length = 256
    alone = saved_bytes(1, length) + NUM_BLOCKS * BATCH * length * WIDTH * 4
    for num_ranks in (2, 4, 8):
        assert saved_bytes(num_ranks, length) == alone / num_ranks


def test_a_block_that_computes_something_else_of_parts_is_refused_by_name() -> None:
    def of_rank(rank: int) -> None:
        model = Blocks(LookingBehind)
        CutBlocks(model, all_ranks())
        with pytest.raises(ConfigError, match=r"block 'blocks\.0' \(LookingBehind\).*result 0 dif"):
            model(inputs())

    run_ranks(of_rank, 2)


def switched(model: Blocks) -> None:
    for index, block in enumerate(model.blocks):
        block.looks = index == 1


def replaced(model: Blocks) -> None:
    model.blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(WIDTH), LookingBehind() if index == 1 else nn.Tanh())
        for index in range(NUM_BLOCKS)
    )


@pytest.mark.parametrize("change", [switched, replaced])
def test_each_block_of_a_class_is_tried(change: Callable[[Blocks], None]) -> None:
    """Only the first block of a class was tried."""

    class Sometimes(LookingBehind):
        looks = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.looks else self.layer(x)

    def of_rank(rank: int) -> None:
        model = Blocks(Sometimes)
        change(model)
        CutBlocks(model, all_ranks())
        with pytest.raises(ConfigError, match=r"block 'blocks\.1'"):
            model(inputs())

    run_ranks(of_rank, 2)


class Rotated(nn.Module):
    """Multiplies by a buffer, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("base", torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x) @ self.base)


def test_a_forward_without_gradients_leaves_an_earlier_graph_as_it_was() -> None:
    """The trial of a block's calls without gradients wrote its buffers anew, which autograd saw."""

    def backward(model: Blocks) -> list[Tensor]:
        y = model(inputs())
        with torch.no_grad():
            model(inputs())
        y.square().mean().backward()
        return [param.grad for param in model.parameters()]

    def of_rank(rank: int) -> list[Tensor]:
        model, ranks = Blocks(Rotated), all_ranks()
        CutBlocks(model, ranks)
        grads = backward(model)
        for grad in grads:
            ranks.all_reduce(grad)
        return [grad / ranks.size for grad in grads]

    expected = backward(Blocks(Rotated))
    for found in run_ranks(of_rank, 2):
        torch.testing.assert_close(found, expected)


def test_fewer_positions_than_ranks_are_computed_in_full_with_a_warning() -> None:
    expected = results(Blocks(gpt_block), inputs(1))

    def of_rank(rank: int) -> list[Tensor]:
        model = Blocks(gpt_block)
        CutBlocks(model, all_ranks())
        return results(model, inputs(1))

    with pytest.warns(UserWarning, match="whose 1 positions are fewer than the 2 context-parallel"):
        found = run_ranks(of_rank, 2)
    for one, other in zip(found[0], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_dropout_between_attentions_is_that_of_a_single_device() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.layer(x), 0.5, self.training)

    torch.manual_seed(5)
    model = Blocks(Dropping)
    torch.manual_seed(5)
    expected = model(inputs()).detach()

    def of_rank(rank: int) -> Tensor:
        model = Blocks(Dropping)
        CutBlocks(model, all_ranks())
        torch.manual_seed(5)
        return full_tensor(model(inputs())).detach()

    for found in run_ranks(of_rank, 2):
        torch.testing.assert_close(found, expected)


def test_restored_blocks_get_full_sequences_and_copies_made_before_are_cut() -> None:
    def of_rank(rank: int) -> tuple[bool, bool]:
        seen: list[type] = []

        class Seeing(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(type(x))
                return super().forward(x)

        model = Blocks(lambda: Seeing(WIDTH, WIDTH))
        cut = CutBlocks(model, all_ranks())
        copy.deepcopy(model)(inputs())
        was_cut = DimShardedTensor in seen
        seen.clear()
        cut.restore()
        model(inputs())
        return was_cut, DimShardedTensor in seen

    assert run_ranks(of_rank, 2) == [(True, False)] * 2


def test_a_model_without_blocks_or_with_blocks_of_others_is_refused() -> None:
    def of_rank(rank: int) -> None:
        with pytest.raises(ConfigError, match="Linear has no ModuleList or Sequential of two"):
            CutBlocks(nn.Linear(2, 2), all_ranks())
        cut = CutBlocks(Blocks(gpt_block), all_ranks())
        with pytest.raises(
            ConfigError, match=r"none of the 3 blocks of Blocks, such as 'blocks\.0'"
        ):
            cut.check_cut(Blocks(gpt_block))

    run_ranks(of_rank, 2)
