"""Every way in which two models can differ."""

import re

import pytest
import torch
from torch import nn

from lightning_shard.data_parallel.agreement import check_alike, check_same_model, met
from lightning_shard.errors import CollectiveMismatchError, ConfigError
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

MODELS = {
    "shape": lambda rank: nn.Linear(2, 2 + rank),
    "name": lambda rank: nn.ModuleDict({f"layer{rank}": nn.Linear(1, 1)}),
    "more": lambda rank: nn.Sequential(*(nn.Linear(1, 1) for _ in range(1 + rank))),
    "fewer": lambda rank: nn.Sequential(*(nn.Linear(1, 1) for _ in range(3 - rank))),
    "dtype": lambda rank: nn.Linear(1, 1, dtype=[torch.float32, torch.float64][rank % 2]),
    "frozen": lambda rank: nn.Linear(1, 1).requires_grad_(rank == 0),
    "order": lambda rank: nn.ModuleDict(
        {name: nn.Linear(1, 1) for name in ("ab", "ba")[rank == 0]}
    ),
}
MESSAGES = {
    "shape": "weight is (2, 2) torch.float32 requires_grad=True on rank 0 and (3, 2)",
    "name": "layer0.weight is (1, 1) torch.float32 requires_grad=True on rank 0 and nothing",
    "more": "1.weight is nothing on rank 0 and (1, 1) torch.float32 requires_grad=True on rank 1",
    "fewer": "2.weight is (1, 1) torch.float32 requires_grad=True on rank 0 and nothing on rank 1",
    "dtype": "torch.float32 requires_grad=True on rank 0 and (1, 1) torch.float64",
    "frozen": "requires_grad=True on rank 0 and (1, 1) torch.float32 requires_grad=False on rank 1",
    "order": "they come in another order",
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_names_the_first_difference(kind: str) -> None:
    def fn(rank: int) -> bool:
        collectives = all_ranks()
        with pytest.raises(ConfigError, match=re.escape(MESSAGES[kind])) as caught:
            check_same_model(MODELS[kind](rank), collectives)
        return str(caught.value).startswith(f"Rank {rank}: the ranks have different models,")

    assert run_ranks(fn, 3) == [True] * 3


def test_ranks_that_compare_at_other_places_are_told_to_which_they_have_come() -> None:
    """What one had gathered for one purpose met what another had for another."""

    def fn(rank: int) -> str:
        collectives = all_ranks()
        with pytest.raises(CollectiveMismatchError) as caught:
            met(rank, collectives, ["step 3", "an epoch's end"][rank])
        return str(caught.value)

    for text in run_ranks(fn, 2):
        assert "rank 0 tells of step 3, rank 1 of an epoch's end" in text


LAYERS = [f"layers.{place}.weight" for place in range(100)]
VALUES = {
    "far": lambda rank: ", ".join([*LAYERS, ("bias", "norm")[rank]]),
    "number": lambda rank: (0.9, torch.tensor([1e-3, 1.00001e-3][rank])),
}
TOLD = {
    "far": r"value is \.\.\..*layers.99.weight, bias on rank 0 and \.\.\..*, norm on rank 1\.",
    "number": r"\(0.9, 0.0010000\d*\) on rank 0 and \(0.9, 0.0010000\d*\) on rank 1",
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_compared_in_full(kind: str) -> None:
    """Of a value 300 characters were compared, and of a tensor four digits."""

    def fn(rank: int) -> str:
        collectives = all_ranks()
        with pytest.raises(ConfigError, match=TOLD[kind]) as caught:
            check_alike({"value": VALUES[kind](rank)}, collectives, "values", "")
        return str(caught.value)

    assert max(map(len, run_ranks(fn, 2))) < 1000
