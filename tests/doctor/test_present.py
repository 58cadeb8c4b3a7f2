"""What is looked for without torch agrees with what the backends say."""

import importlib.util

import pytest

from lightning_shard.backends.registry import backend_names, get_backend
from lightning_shard.backends.shm.doorbell import SYSTEM_CALLS
from lightning_shard.doctor import present


@pytest.mark.parametrize("name", [name for name in backend_names() if name != "mpi"])
def test_a_backend_is_here_if_it_says_so_itself(name: str) -> None:
    assert (present.absent(name) is None) == (get_backend(name).unavailable_reason() is None)


def test_mpi_is_absent_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mpi4py" else real(name)
    )
    assert "pip install 'lightning-shard[mpi]'" in str(present.absent("mpi"))


def test_the_machines_of_shm_are_those_that_it_has_been_proved_on() -> None:
    assert set(present._SHM_MACHINES) == set(SYSTEM_CALLS)


def test_without_torch_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert {present.absent(name) for name in backend_names()} == {"torch is not installed"}
