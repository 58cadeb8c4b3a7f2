"""What is looked for without torch agrees with what the backends say.

Versions that do not fit are named with the command that mends them.
"""

import importlib.util
from importlib.metadata import PackageNotFoundError

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


def versions(monkeypatch: pytest.MonkeyPatch, lines: list[str], **installed: str) -> list[str]:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(present, "requires", lambda _: lines)
    monkeypatch.setattr(present, "version", version)
    return [f"{one.state}: {one.found} {one.advice}" for one in present.software()][1:]


def test_what_is_missing_or_too_old_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.11", "rich>=13", "nothing>=2", 'ray>=2; extra == "ray"']
    assert versions(monkeypatch, lines, torch="2.9.1", rich="15.0") == [
        "failure: 2.9.1, expected >=2.11 pip install 'torch>=2.11'",
        "ok: 15.0 ",
        "failure: not installed pip install 'nothing>=2'",
    ]


def test_a_version_that_is_left_out_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = versions(monkeypatch, ["lightning>=2.6,!=2.6.2"], lightning="2.6.2")
    assert found.startswith("failure: 2.6.2, expected !=2.6.2,>=2.6")


def test_a_local_build_is_the_version_that_it_is_built_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert versions(monkeypatch, ["torch>=2.11"], torch="2.13.0+cpu") == ["ok: 2.13.0+cpu "]
