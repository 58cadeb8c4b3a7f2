"""Who the environment says that it is, inside and outside a world."""

import pytest

from lightning_shard.environments.started_elsewhere import InProcessEnvironment
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks


def test_outside_a_world_it_is_rank_0() -> None:
    environment = InProcessEnvironment(4)
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank()) == (4, 0)
    assert (environment.local_rank(), environment.node_rank()) == (0, 0)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 0)
    assert not InProcessEnvironment.detect()


def test_inside_a_world_it_answers_for_the_running_rank() -> None:
    environment = InProcessEnvironment(3)

    def fn(rank: int) -> tuple[int, int, int]:
        environment.set_global_rank(99)
        return environment.global_rank(), environment.local_rank(), environment.world_size()

    assert run_ranks(fn, 3) == [(rank, rank, 3) for rank in range(3)]


def test_a_world_of_another_size_is_refused() -> None:
    InProcessEnvironment(2).set_world_size(2)
    with pytest.raises(ConfigError, match="expected 2"):
        InProcessEnvironment(2).set_world_size(4)


def test_number_of_ranks_is_checked() -> None:
    with pytest.raises(ConfigError, match="num_ranks=0"):
        InProcessEnvironment(0)
