"""The renamed c10d functions: one name for each, and no warning from either torch."""

import inspect

import torch.distributed as dist

from lightning_shard.backends import c10d_transfers


def test_the_name_that_does_not_warn_is_used() -> None:
    renamed = hasattr(dist, "reduce_scatter_single")
    suffixes = ("_single", "_single") if renamed else ("_tensor", "_into_tensor")
    assert c10d_transfers.reduce_scatter_flat.__name__ == "reduce_scatter" + suffixes[0]
    assert c10d_transfers.all_gather_flat.__name__ == "all_gather" + suffixes[1]


def test_both_take_output_then_input() -> None:
    scatter = list(inspect.signature(c10d_transfers.reduce_scatter_flat).parameters)
    gather = list(inspect.signature(c10d_transfers.all_gather_flat).parameters)
    assert scatter == ["output", "input", "op", "group", "async_op"]
    assert [name.split("_")[0] for name in gather] == ["output", "input", "group", "async"]
