"""The suite that every backend must pass, on in-process groups."""

import pytest
import torch.distributed as dist

from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.testing import run_ranks
from tests.backends.conformance import run_checks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_conformance(num_ranks: int) -> None:
    def fn(rank: int) -> dict[str, str]:
        group = dist.group.WORLD
        assert group is not None
        return run_checks(InProcessBackend().collectives(group))

    assert run_ranks(fn, num_ranks) == [{}] * num_ranks
