"""Every way in which two models can differ."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.agreement import check_same_model
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks

MODELS = {
    "shape": lambda rank: nn.Linear(2, 2 + rank),
    "name": lambda rank: nn.ModuleDict({f"layer{rank}": nn.Linear(1, 1)}),
    "more": lambda rank: nn.Sequential(*(nn.Linear(1, 1) for _ in range(1 + rank))),
    "fewer": lambda rank: nn.Sequential(*(nn.Linear(1, 1) for _ in range(3 - rank))),
    "dtype": lambda rank: nn.Linear(1, 1, dtype=[torch.float32, torch.float64][rank % 2]),
    "frozen": lambda rank: nn.Linear(1, 1).requires_grad_(rank == 0),
}
MESSAGES = {
    "shape": "Rank 1 has [weight (3, 2)",
    "name": "Rank 1 has [layer1.weight",
    "more": "[1.weight (1, 1) torch.float32 requires_grad=True] where rank 0 has [none]",
    "fewer": "[none] where rank 0 has [2.weight",
    "dtype": "torch.float64 requires_grad=True] where rank 0 has [weight (1, 1) torch.float32",
    "frozen": "requires_grad=False] where rank 0 has [weight (1, 1) torch.float32 requires_grad=T",
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_names_the_first_difference(kind: str) -> None:
    def fn(rank: int) -> bool:
        assert dist.group.WORLD is not None
        collectives = get_backend("in_process").collectives(dist.group.WORLD)
        with pytest.raises(ConfigError, match=re.escape(MESSAGES[kind])) as caught:
            check_same_model(MODELS[kind](rank), collectives)
        return str(caught.value).startswith(f"Rank {rank}: the ranks have different models.")

    assert run_ranks(fn, 3) == [True] * 3
