"""A measured profile is one that a plan reads."""

from pathlib import Path

import pytest

from lightning_shard.errors import ConfigError
from lightning_shard.planning.machine import machine_profile
from lightning_shard.tools.doctor.measuring import measured_machine


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", pytest.param("shm", marks=pytest.mark.slow)])
def test_ranks_measure_together_and_a_plan_reads_it(backend: str, tmp_path: Path) -> None:
    found = measured_machine(num_ranks=2, backend=backend, network=1e9, quick=True)
    assert found.devices_per_node == 2
    assert found.network_bytes_per_second == 1e9
    rates = ("flops_16", "flops_32", "memory_bytes_per_second", "node_bytes_per_second")
    assert all(getattr(found, rate) > 1e3 for rate in (*rates, "host_bytes_per_second"))
    assert 0 < found.message_seconds < 1
    found.save(tmp_path / "here.json")
    assert machine_profile(tmp_path / "here.json") == found


def test_a_backend_whose_ranks_are_no_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="got the backend 'in_process' to measure with, expected"):
        measured_machine(backend="in_process")


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="got -1 ranks to measure with, expected at least one"):
        measured_machine(num_ranks=-1)
