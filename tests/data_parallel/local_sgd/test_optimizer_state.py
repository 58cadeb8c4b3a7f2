"""The mean of the ranks' optimizer state."""

import torch
from torch import nn

from lightning_shard.data_parallel.local_sgd.rules import averaged_state
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks


def _states(rank: int) -> tuple[dict, dict, dict]:
    """Parameter 0 is used by every rank, 1 by rank 1 alone, 2 by none."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.Adam(params, lr=0.1)
    params[0].grad = torch.full((2,), float(rank))
    if rank == 1:
        params[1].grad = torch.ones(2)
    optimizer.step()
    collectives = all_ranks()
    before = optimizer.state_dict()["state"]
    with averaged_state(optimizer, collectives):
        inside = optimizer.state_dict()["state"]
    return before, inside, optimizer.state_dict()["state"]


def test_elements_are_averaged_over_those_that_have_them() -> None:
    ranks = run_ranks(_states, 3)
    for rank, (before, inside, after) in enumerate(ranks):
        torch.testing.assert_close(inside[0]["exp_avg"], torch.full((2,), 0.1 * (0 + 1 + 2) / 3))
        torch.testing.assert_close(inside[1]["exp_avg"], torch.full((2,), 0.1))
        assert 2 not in inside
        assert before[0]["step"] == inside[0]["step"] == 1
        assert before.keys() == after.keys() == ({0, 1} if rank == 1 else {0})
        for index, entries in before.items():
            for key, value in entries.items():
                assert after[index][key] is value
