"""How a model is cut into fragments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_shard.data_parallel.compression import TopK
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.local_sgd.local_sgd import LocalParameters, cut_into_fragments
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

TABLES = [
    ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
    ([1, 1, 1, 1], 3, [[0], [1, 2], [3]]),
    ([9, 1, 1, 1], 2, [[0], [1, 2, 3]]),
    ([1, 1, 1, 9], 2, [[0, 1, 2], [3]]),
    ([9, 1, 1, 1], 4, [[0], [1], [2], [3]]),
    ([0, 0, 5], 3, [[0], [1], [2]]),
    ([1, 0], 1, [[0, 1]]),
]


@pytest.mark.parametrize(("numels", "num_fragments", "expected"), TABLES)
def test_runs_of_about_equal_size(
    numels: list[int], num_fragments: int, expected: list[list[int]]
) -> None:
    named = {str(place): numel for place, numel in enumerate(numels)}
    cut = cut_into_fragments(named, num_fragments)
    assert cut == [[str(place) for place in run] for run in expected]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 30))
def test_every_parameter_is_in_one_fragment_in_order(numels: list[int], wanted: int) -> None:
    named = {str(place): numel for place, numel in enumerate(numels)}
    cut = cut_into_fragments(named, min(wanted, len(numels)))
    assert all(cut)
    assert [name for run in cut for name in run] == list(named)
    # a run is at most the greatest parameter larger than its share
    share = sum(numels) / len(cut)
    if len(cut) * 2 <= len(numels) and min(numels) > 0:
        assert max(sum(named[name] for name in run) for run in cut) <= share + 2 * max(numels)


def test_more_fragments_than_parameters() -> None:
    with pytest.raises(ConfigError, match="the model has 2 parameters"):
        cut_into_fragments({"a": 1, "b": 1}, 3)


def _orders_of_parameters(rank: int) -> dict[str, list[str]]:
    collectives = all_ranks()
    orders: dict[str, list[str]] = {}
    for stage, compression in ((0, None), (0, TopK()), (1, TopK()), (2, TopK())):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        names = {param: name for name, param in model.named_parameters()}
        orders["model"] = [*names.values()]
        options = EngineOptions(stage=stage, compression=compression)
        engine = DataParallelEngine(model, collectives, options)
        if stage == 0 and compression is None:
            orders["fragments"] = [*LocalParameters(engine).views]
        in_buffers = [param for flat in engine.flats for param in flat.params]
        orders[f"{stage}, {compression}"] = [names[param] for param in in_buffers]
    return orders


def test_biases_that_have_moved_behind_weights_make_no_other_fragments() -> None:
    """A run of an earlier version went on with other fragments, and means of what ranks kept."""
    for orders in run_ranks(_orders_of_parameters, 2):
        assert len(orders) == 6
        assert all(order == orders["model"] for order in orders.values())
