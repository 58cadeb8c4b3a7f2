"""Cuts against brute force, and which stages need what stands outside the blocks."""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import find_blocks
from lightning_shard.pipeline_parallel.partition import (
    BlockCosts,
    Partition,
    buffer_stages,
    parameter_stages,
    partition_blocks,
)
from tests.pipeline_parallel.test_blocks import Net, bert, gpt2, linears, llama, t5, tiny_gpt, vit


def cut(model: nn.Module, num_stages: int, path: str | None = None, **options: Any) -> Partition:
    return partition_blocks(model, find_blocks(model, path), num_stages=num_stages, **options)


def outside(model: nn.Module, num_stages: int, path: str | None = None) -> dict[str, Any]:
    """Return the stages of each parameter outside the blocks."""
    partition = cut(model, num_stages, path)
    stages = parameter_stages(model, partition)
    inside = f"{partition.blocks.path}."
    return {
        name: stages[param]
        for name, param in model.named_parameters()
        if not name.startswith(inside)
    }


def bounds_of(
    before: float, blocks: Sequence[float], after: float, num_stages: int
) -> tuple[int, ...]:
    model = nn.Sequential(*(nn.Identity() for _ in blocks))
    costs = BlockCosts(before=before, blocks=tuple(blocks), after=after)
    return cut(model, num_stages, "", split="flops", measured=costs).bounds


costs = st.integers(0, 9)


@given(before=costs, blocks=st.lists(costs, min_size=1, max_size=8), after=costs, data=st.data())
def test_a_cut_is_the_best_of_all(before: int, blocks: list[int], after: int, data: Any) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    all_costs = [before, *blocks, after]

    def merit(bounds: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        edges = [0, *(at + 1 for at in bounds[1:-1]), len(all_costs)]
        largest = max(sum(all_costs[start:stop]) for start, stop in pairwise(edges))
        return largest, sum((stop - start) ** 2 for start, stop in pairwise(bounds)), bounds

    inner = combinations(range(1, len(blocks)), num_stages - 1)
    best = min(merit((0, *starts, len(blocks))) for starts in inner)
    assert bounds_of(before, blocks, after, num_stages) == best[2]


@pytest.mark.parametrize(
    ("before", "blocks", "after", "num_stages", "bounds"),
    [
        (0, [1] * 8, 0, 4, (0, 2, 4, 6, 8)),
        (0, [1] * 7, 0, 3, (0, 2, 4, 7)),  # the first stage holds the most activations
        (2, [1] * 8, 0, 2, (0, 3, 8)),
        (0, [1] * 8, 4, 2, (0, 6, 8)),
        (9, [1] * 8, 0, 4, (0, 1, 3, 5, 8)),
        (0, [0] * 6, 0, 3, (0, 2, 4, 6)),
        (0, [5, 1, 1, 1, 1, 1], 0, 2, (0, 1, 6)),
        (3, [1], 3, 1, (0, 1)),
    ],
)
def test_cuts(
    before: int, blocks: list[int], after: int, num_stages: int, bounds: tuple[int, ...]
) -> None:
    assert bounds_of(before, blocks, after, num_stages) == bounds


def test_embedding_and_head_count_to_the_outer_stages() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*linears(6)), nn.Linear(8, 24))
    assert cut(model, 3, "1").bounds == (0, 2, 5, 6)


def test_a_tied_weight_counts_once_on_a_stage() -> None:
    """Of three equal blocks that share one weight two fit where one other block does."""
    blocks = linears(5)
    for block in blocks[1:3]:
        block.weight = blocks[0].weight
    assert cut(Net(nn.ModuleList(blocks)), 3).bounds == (0, 3, 4, 5)


def test_a_partition_answers_for_its_blocks() -> None:
    partition = cut(nn.Sequential(*linears(7)), 3, split=[2, 3])
    assert partition.bounds == (0, 2, 3, 7)
    assert partition.num_stages == 3
    assert [partition.stage_of(block) for block in range(7)] == [0, 0, 1, 2, 2, 2, 2]
    assert partition.modules(1) == partition.blocks.modules[2:3]


@pytest.mark.parametrize(
    "split", [[2], [2, 3, 4], [3, 2], [2, 2], [0, 2], [2, 5], [-1, 2], [1, True]]
)
def test_indices_that_are_no_cut_are_refused(split: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"2 rising indices from 1 to 4, such as \[1, 3\]"):
        cut(nn.Sequential(*linears(5)), 3, split=split)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="'flop' is unknown; expected 'parameters', 'flops', 'me"):
        cut(nn.Sequential(*linears(5)), 3, split="flop")


def test_a_measured_split_asks_for_its_measurement() -> None:
    with pytest.raises(ConfigError, match="'memory' balances measured costs"):
        cut(nn.Sequential(*linears(5)), 3, split="memory")


@pytest.mark.parametrize("num_stages", [0, 4])
def test_fewer_blocks_than_stages_names_the_sizes_that_work(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=r"has 3 blocks.*expected between 1 and 3 stages"):
        cut(tiny_gpt(), num_stages)


def test_the_example_model() -> None:
    assert outside(tiny_gpt(), 3) == {
        "byte_embedding.weight": (0,),
        "position_embedding.weight": (0,),
        "norm.weight": (2,),
        "norm.bias": (2,),
        "head.weight": (2,),
    }


def test_each_block_belongs_to_its_stage() -> None:
    model = tiny_gpt()
    stages = parameter_stages(model, cut(model, 2, split=[1]))
    for block, stage in enumerate([0, 1, 1]):
        assert {stages[param] for param in model.blocks[block].parameters()} == {(stage,)}
    assert list(stages) == list(model.parameters())


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (lambda: tiny_gpt(tie_embeddings=True), "byte_embedding.weight"),
        (gpt2, "transformer.wte.weight"),
        (bert, "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_a_tied_embedding_belongs_to_both_ends(make: Callable[[], nn.Module], tied: str) -> None:
    stages = outside(make(), 3)
    assert [name for name, found in stages.items() if found == (0, 2)] == [tied]
    assert set(stages.values()) == {(0,), (2,), (0, 2)}


def test_on_one_stage_all_is_there_once() -> None:
    assert set(outside(gpt2(), 1).values()) == {(0,)}


def test_an_encoder_stays_on_the_first_stage() -> None:
    stages = outside(t5(), 3, "decoder.block")
    assert {found for name, found in stages.items() if name.startswith("encoder.")} == {(0,)}
    assert stages["shared.weight"] == (0, 2)
    assert stages["decoder.final_layer_norm.weight"] == (2,)


def test_the_class_token_of_a_vision_transformer_is_on_the_first_stage() -> None:
    stages = outside(vit(), 3)
    assert stages["vit.embeddings.cls_token"] == (0,)
    assert stages["classifier.weight"] == (2,)


def test_a_parameter_beside_the_blocks_may_be_used_at_both_ends() -> None:
    model = Net(nn.ModuleList(linears(3)))
    model.temperature = nn.Parameter(torch.ones(()))
    assert outside(model, 3)["temperature"] == (0, 2)


def test_a_second_name_of_the_network_changes_nothing() -> None:
    net = Net(nn.ModuleList(linears(3)))
    before = nn.ModuleDict({"first": net.blocks, "net": net})
    after = nn.ModuleDict({"net": net, "same": net, "layers": net.blocks})
    some = nn.ModuleDict({"net": net, "some": nn.ModuleList(net.blocks[:2])})
    for model in (after, some):
        stages = parameter_stages(model, cut(model, 3, "net.blocks"))
        expected = parameter_stages(net, cut(net, 3))
        assert stages == expected
    assert len(parameter_stages(before, cut(before, 3, "first"))) == 10


def test_a_module_that_is_used_at_both_ends_belongs_to_both() -> None:
    model = Net(nn.ModuleList(linears(3)))
    model.again = model.embed
    assert outside(model, 3)["embed.weight"] == (0, 2)


def test_a_weight_of_two_blocks_belongs_to_the_stages_of_both() -> None:
    blocks = linears(3)
    blocks[2].weight = blocks[0].weight
    model = Net(nn.ModuleList(blocks))
    stages = parameter_stages(model, cut(model, 3))
    assert stages[blocks[0].weight] == (0, 2)
    assert stages[blocks[2].bias] == (2,)


def test_buffers_follow_the_rules_for_parameters() -> None:
    model = Net(nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3)))
    model.embed = nn.BatchNorm1d(8)
    model.register_buffer("mask", torch.ones(2))
    stages = buffer_stages(model, cut(model, 3))
    found = {name: stages[buffer] for name, buffer in model.named_buffers()}
    assert found["embed.running_mean"] == (0,)
    assert found["blocks.1.running_var"] == (1,)
    assert found["mask"] == (0, 2)


def test_the_positions_of_a_language_model_are_a_buffer_of_the_last_stage() -> None:
    """Every stage needs them, which is why all keep what is outside the blocks."""
    model = llama()
    stages = buffer_stages(model, cut(model, 3))
    assert stages[model.get_buffer("model.rotary_emb.inv_freq")] == (2,)
