"""What the MPI backend says where MPI is missing."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.registry import get_backend
from lightning_shard.errors import BackendUnavailableError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("cannot load MPI library"), "no MPI library it can load"),
        (ImportError("libmpi.so.40: cannot open shared object file"), "libmpi.so.40"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(BackendUnavailableError, match=said) as caught:
        get_backend("mpi").check(torch.device("cpu"))
    assert "pip install 'lightning-shard[mpi]'" in str(caught.value)


def test_without_mpi4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # of a test before
    said = "mpi4py is not installed: pip install 'lightning-shard[mpi]'"
    assert runtime.unavailable_reason() == said


def test_an_mpi_without_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    single = SimpleNamespace(Query_thread=lambda: 0, THREAD_SERIALIZED=2)
    monkeypatch.setattr(importlib, "import_module", lambda name: single)
    with pytest.raises(BackendUnavailableError, match="needs MPI_THREAD_SERIALIZED"):
        runtime.mpi.__wrapped__()
