"""A given plan that cuts a fused projection otherwise than its module reads it is refused."""

import pytest
from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.fused_layouts import check_layouts
from lightning_shard.tensor_parallel.plan import match_plan
from tests.tensor_parallel.test_automatic import FusedAttention, FusedGate, Grouped, Net

OF_HEADS = {"block.mix": "colwise", "block.back": "rowwise"}
PACKED = {"block.mix": "packed_colwise(3)", "block.back": "rowwise"}


def check(block: nn.Module, plan: dict[str, str], num_ranks: int = 2) -> None:
    model = Net(block)
    check_layouts(model, match_plan(model, plan), num_ranks)


@pytest.mark.parametrize(
    ("block", "plan", "right"),
    [
        (FusedAttention(by_heads=False), OF_HEADS, r"packed_colwise\(3\)"),
        (FusedAttention(by_heads=True), PACKED, "colwise"),
        (
            FusedGate(),
            {"block.gate_up": "colwise", "block.down": "rowwise"},
            r"packed_colwise\(2\)",
        ),
    ],
)
def test_a_fused_projection_cut_in_the_wrong_way_trained_another_model(
    block: nn.Module, plan: dict[str, str], right: str
) -> None:
    with pytest.raises(ConfigError, match=f"computed the same with '{right}', expected that"):
        check(block, plan)


def test_what_a_trial_confirms_or_cannot_tell_is_accepted() -> None:
    check(FusedAttention(by_heads=False), PACKED)
    check(FusedAttention(by_heads=True), OF_HEADS)
    shared = dict.fromkeys(("block.q_proj", "block.k_proj", "block.v_proj"), "colwise")
    check(Grouped(num_kv_heads=2), shared | {"block.o_proj": "rowwise"})
    check(FusedAttention(by_heads=False), OF_HEADS, num_ranks=1)
    check(FusedAttention(by_heads=False), {"block.mix": "colwise_gather_output"})
    check(FusedAttention(by_heads=False), OF_HEADS, num_ranks=3)  # the automatic plan refuses it
