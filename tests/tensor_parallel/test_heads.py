"""Counts of heads follow the split of the projections, and a refused plan changes nothing."""

import pytest
import torch
from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.tensor_parallel.test_split import GPT_PLAN, compare, group_of_all, small_gpt


class Attention(nn.Module):
    """Says how wide a head is; four of queries, two of keys and of values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_groups = 4, 4, 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 4 * heads) for heads in (4, 2, 2))


PLAN = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise"}


def attention() -> nn.Module:
    return nn.ModuleDict({"attention": Attention()})


def counts(model: nn.Module) -> tuple[int, int]:
    own = model.get_submodule("attention").__dict__
    return own["num_heads"], own["num_key_value_groups"]


@pytest.mark.parametrize(
    ("keys", "num_ranks", "expected"), [("colwise", 2, (2, 2)), ("shared_heads(2)", 4, (1, 1))]
)
def test_each_rank_counts_its_own(keys: str, num_ranks: int, expected: tuple[int, int]) -> None:
    def fn(rank: int) -> None:
        model = attention()
        plan = PLAN | {"*.k_proj": keys, "*.v_proj": keys}
        split = SplitModel(model, match_plan(model, plan), group_of_all())
        assert counts(model) == expected
        split.restore()
        assert counts(model) == (4, 2)

    run_ranks(fn, num_ranks)


def test_a_projection_that_would_be_cut_within_a_head_is_refused() -> None:
    """Its features have a size that may fold all the same, into heads that are none."""

    def fn(rank: int) -> None:
        model = attention()
        with pytest.raises(
            ConfigError,
            match=r"k_proj has 2 heads of 4, which 4 .* of 1, 2, or, .*shared_heads\(2\)",
        ):
            SplitModel(model, match_plan(model, PLAN), group_of_all())

    run_ranks(fn, 4)


@pytest.mark.parametrize("refused", ["head", "heads"])
def test_a_refused_plan_leaves_the_model_as_it_was(refused: str) -> None:
    """Its first layers were cut already when a later one was refused."""

    def fn(rank: int) -> None:
        model = small_gpt()
        plan = GPT_PLAN | ({"head": "packed_colwise(5)"} if refused == "head" else {})
        if refused == "heads":
            model.blocks[1].num_heads = 3
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match=r"multiple of 5|num_heads is 3"):
            SplitModel(model, match_plan(model, plan), group_of_all())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert model.blocks[0].num_heads == 4
        assert not any("tensor_parallel" in key for m in model.modules() for key in m.__dict__)

    run_ranks(fn, 2)


def test_the_count_is_left_alone_when_only_a_pair_is_split() -> None:
    """A plan for the feed-forward layers alone halved the heads of the block's attention."""
    text = torch.arange(24).view(3, 8) * 9 % 256
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    compare(small_gpt, plan, lambda model: model.loss([text, text.roll(1)]), 2)
