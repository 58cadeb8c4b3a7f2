"""What a split leaves on each rank, how ranks share what is tied, and what comes back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.pipeline_parallel.blocks import find_blocks
from lightning_shard.pipeline_parallel.gradients import GradientStash
from lightning_shard.pipeline_parallel.partition import partition_blocks
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

CPU = torch.device("cpu")


class Net(nn.Module):
    """The embedding is also the head's matrix; a buffer is in the blocks, another outside."""

    scale: Tensor

    def __init__(self, filled_with: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(4))
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(2))
        with torch.no_grad():
            for tensor in (*self.parameters(), self.scale):
                tensor.fill_(filled_with)


def split_of(model: nn.Module, stage_ranks: Sequence[int]) -> PipelineSplit:
    partition = partition_blocks(model, find_blocks(model), num_stages=len(stage_ranks))
    return PipelineSplit(model, partition, stage_ranks, all_ranks(), CPU)


def here(rank: int, stage_ranks: Sequence[int]) -> set[str]:
    """Return the names of the parameters that have elements on a rank."""
    model = Net()
    split = split_of(model, stage_ranks)
    names = {name for name, param in model.named_parameters() if param.numel()}
    assert names == {name for name, param in model.named_parameters() if split.is_here(param)}
    shapes = {param: param.shape for param in Net().parameters()}
    missing = {name for name, param in model.named_parameters() if param in split.full_shapes}
    assert missing.isdisjoint(names)
    assert len(missing) + len(names) == len(shapes)
    return names


def test_each_rank_keeps_its_stages_and_what_is_tied_across_them() -> None:
    first, second = run_ranks(lambda rank: here(rank, (0, 1)), 2)
    norms = [{f"blocks.{index}.{kind}" for kind in ("weight", "bias")} for index in range(4)]
    assert first == {"embed.weight"} | norms[0] | norms[1]
    assert second == {"embed.weight", "head.bias"} | norms[2] | norms[3]


def test_the_rank_at_both_ends_of_a_v_has_what_stands_before_and_after() -> None:
    first, second = run_ranks(lambda rank: here(rank, (0, 1, 1, 0)), 2)
    assert {"embed.weight", "head.bias"} < first
    assert {name.split(".")[1] for name in second} == {"1", "2"}


def test_all_ranks_begin_with_the_first_ones_values() -> None:
    def work(rank: int) -> list[float]:
        model = Net(filled_with=1.0 + rank)
        split_of(model, (0, 1))
        held = [*model.parameters(), model.scale]
        return [value for tensor in held for value in tensor.flatten().tolist()]

    assert all(value == 1 for values in run_ranks(work, 2) for value in values)


def test_parameters_stay_the_objects_that_optimizers_hold() -> None:
    def work(rank: int) -> bool:
        model = Net()
        before = dict(model.named_parameters())
        split = split_of(model, (0, 1))
        split.restore()
        return all(param is before[name] for name, param in model.named_parameters())

    assert all(run_ranks(work, 2))


def test_gradients_of_what_is_tied_are_summed_and_of_nothing_else() -> None:
    def work(rank: int) -> dict[str, float]:
        model = Net()
        split = split_of(model, (0, 1, 2))
        names = {param: name for name, param in model.named_parameters()}
        mine = [param for param in names if split.is_here(param)]
        stash = GradientStash(mine, 1.0)
        stash.add(mine, [torch.full_like(param, 1.0 + rank) for param in mine])
        split.sum_ties(stash)
        return {names[param]: stash.own(param).mean().item() for param in mine}

    first, second, third = run_ranks(work, 3)
    assert first["embed.weight"] == third["embed.weight"] == 1 + 3
    assert first["blocks.0.weight"] == 1
    assert set(second.values()) == {2}
    assert third["head.bias"] == 3


def test_a_tied_parameter_counts_once() -> None:
    def work(rank: int) -> list[str]:
        model = Net()
        split = split_of(model, (0, 1))
        return [name for name, param in model.named_parameters() if split.counts(param)]

    counted = [name for names in run_ranks(work, 2) for name in names]
    assert sorted(counted) == sorted(name for name, _ in Net().named_parameters())


def test_restoring_gives_every_rank_what_the_stages_have_made() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = Net()
        split = split_of(model, (0, 1))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(rank)
            for block in model.blocks:
                block.running_mean.add_(rank)
        split.restore()
        return {name: tensor.unique().tolist() for name, tensor in model.state_dict().items()}

    first, second = run_ranks(work, 2)
    assert first == second
    assert first["head.weight"] == first["embed.weight"] == [1]  # the first rank's
    assert first["blocks.0.weight"] == [1]
    assert first["blocks.3.weight"] == first["head.bias"] == [2]
    assert first["blocks.1.running_mean"] == [0]
    assert first["blocks.3.running_mean"] == [1]


def test_without_the_full_model_nothing_is_gathered() -> None:
    def work(rank: int) -> int:
        model = Net()
        split_of(model, (0, 1)).restore(full=False)
        return model.blocks[0].weight.numel()

    assert run_ranks(work, 2) == [3, 0]
