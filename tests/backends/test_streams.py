"""Marks and streams: what follows what, where streams write down what is asked of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.backends import streams
from lightning_shard.backends.streams import (
    CudaStreams,
    drain_streams,
    join_streams,
    mark_streams,
    sent_up,
    streams_of,
)
from lightning_shard.data_parallel.offload import copier as copier_module
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.data_parallel.offload.copier import HostCopier


class Mark:
    """A stream, or a mark on one, by name."""

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name


class Written:
    """Streams that write down what is asked of them; the current one is "main" unless changed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._current = Mark("main")

    def current(self, device: torch.device) -> Mark:
        return self._current

    def make(self, device: torch.device) -> Mark:
        return Mark("side")

    @contextmanager
    def use(self, stream: Mark) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def mark(self, stream: Mark) -> Mark:
        return Mark(stream.name)

    def follow(self, mark: Mark) -> None:
        self.calls.append(f"{self._current.name} follows {mark.name}")

    def finish(self, mark: Mark) -> None:
        self.calls.append(f"host waits for {mark.name}")

    def keep(self, tensor: Tensor, stream: Mark) -> None:
        self.calls.append(f"kept for {stream.name}")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """Let the CPU have streams that write down what is asked of them."""
    made: Any = Written()
    assert isinstance(made, Written)
    monkeypatch.setitem(streams.STREAMS, "cpu", made)
    monkeypatch.setattr(copier_module.HostCopier, "empty", lambda _, like, dtype=None: like.clone())
    return made


def test_the_cpu_has_no_streams() -> None:
    tensor = torch.ones(3)
    assert streams_of(tensor.device) is None
    assert mark_streams([tensor]) == []
    drain_streams([tensor])
    join_streams([None])
    assert torch.equal(sent_up(tensor, tensor.device), tensor)


def test_cuda_has_streams() -> None:
    assert isinstance(streams.STREAMS["cuda"], CudaStreams)


def test_who_joins_follows_who_marked(written: Written) -> None:
    with written.use(Mark("other")):
        marks = mark_streams([torch.ones(2), torch.ones(3)])
    join_streams([*marks, None])
    drain_streams([torch.ones(2)])
    assert written.calls == ["main follows other", "host waits for main"]


def test_a_copy_down_follows_what_made_it_and_keeps_its_memory(written: Written) -> None:
    copier = HostCopier(torch.device("cpu"))
    source, target = torch.ones(3), torch.zeros(3)
    copier.down(source, target)
    assert written.calls == ["side follows main", "kept for side"]
    copier.finish()
    copier.finish()  # nothing has been started since
    assert written.calls[2:] == ["host waits for side"]


def test_who_uses_a_copy_that_went_up_joins_it_and_the_host_does_not_wait(written: Written) -> None:
    copier = HostCopier(torch.device("cpu"))
    copier.up(torch.ones(3), torch.zeros(3))
    copier.join()
    assert written.calls == ["side follows main", "main follows side"]


def test_the_current_stream_is_the_same_after_an_error(written: Written) -> None:
    copier = HostCopier(torch.device("cpu"))
    with pytest.raises(RuntimeError):
        copier.down(torch.ones(3), torch.zeros(4))
    copier.join()
    assert written.calls[-1] == "main follows side"


def test_memory_that_went_down_is_let_go_of_once_its_copy_is_followed(written: Written) -> None:
    host = HostActivations(torch.device("cpu"))
    stretch = host.stretch(torch.ones(1000))
    assert written.calls == ["side follows main"]
    stretch.leave()
    assert written.calls[1:] == ["main follows side"]
    host.elements(stretch)
    assert written.calls[2:] == ["side follows main", "main follows side"]
    del stretch
    assert written.calls[4:] == ["main follows side"]
