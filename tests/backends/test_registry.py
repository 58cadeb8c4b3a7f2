"""Backends by name, and what they say when they cannot run."""

import resource

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.registry import NCCLBackend, auto_backend, backend_names, get_backend
from lightning_shard.backends.shm.backend import ShmBackend
from lightning_shard.errors import BackendUnavailableError, ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_every_name_gives_its_backend() -> None:
    assert {"nccl", "gloo", "in_process"} <= set(backend_names())
    for name in backend_names():
        assert get_backend(name).name == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [("glo", "Did you mean 'gloo'?"), ("inprocess", "Did you mean 'in_process'?"), ("ucc", "")],
)
def test_an_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_backend(name)
    message = str(caught.value)
    assert f"Unknown backend {name!r}; expected one of" in message
    assert all(known in message for known in backend_names())
    assert message.endswith(hint or "'auto'.")


def test_auto() -> None:
    assert auto_backend(CPU).name == "gloo"
    assert auto_backend(CPU, are_neighbours=True).name == "shm"
    assert auto_backend(CUDA).name == auto_backend(CUDA, are_neighbours=True).name == "nccl"
    with pytest.raises(ConfigError, match="No backend for tensors on mps"):
        auto_backend(torch.device("mps"))


def test_auto_shares_no_memory_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (64 << 30, 64 << 30))
        assert auto_backend(CPU, are_neighbours=True).name == "gloo"
    monkeypatch.setattr(ShmBackend, "unavailable_reason", lambda _: "this is another machine")
    assert auto_backend(CPU, are_neighbours=True).name == "gloo"


@pytest.mark.parametrize(("name", "chosen"), [("gloo", "gloo"), ("shm", "shm"), ("nccl", "gloo")])
def test_auto_goes_on_with_the_group_that_stands(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: name)
    assert auto_backend(CPU, are_neighbours=True).name == chosen


def test_gloo_moves_cpu_tensors_only() -> None:
    get_backend("gloo").check(CPU)
    with pytest.raises(ConfigError, match="moves tensors on cpu, but this rank's device is cuda"):
        get_backend("gloo").check(CUDA)


def test_nccl_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="no CUDA device is visible"):
        NCCLBackend().check(CUDA)


def test_nccl_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="Install a CUDA wheel"):
        NCCLBackend().check(CUDA)


def test_gloo_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="built without Gloo"):
        get_backend("gloo").check(CPU)
