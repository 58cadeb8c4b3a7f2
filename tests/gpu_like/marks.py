"""The device's streams, as the package asks for them: who follows whom is seen, nothing queued."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from tests.gpu_like.order import Agent, Clock
from tests.gpu_like.tracking import key_of
from tests.gpu_like.watch import Watch


@dataclass(frozen=True, eq=False)
class Mark:
    """A mark on a stream."""

    device: torch.device
    clock: Clock


class WatchedStreams:
    """Streams of the device; `backends.streams.Streams` has what each method does."""

    def __init__(self, watch: Watch, device: torch.device) -> None:
        self._watch, self._tracker, self._device = watch, watch.tracker, device
        self._numbers = count(1)

    def current(self, device: torch.device) -> Agent:
        """Return the current stream."""
        return self._tracker.stream

    def make(self, device: torch.device) -> Agent:
        """Return a new stream."""
        return Agent(f"side stream {next(self._numbers)}")

    @contextmanager
    def use(self, stream: Agent) -> Iterator[None]:
        """Make a stream the current one inside."""
        before, self._tracker.stream = self._tracker.stream, stream
        try:
            yield
        finally:
            self._tracker.stream = before

    def mark(self, stream: Agent) -> Mark:
        """Return a mark."""
        return Mark(self._device, {**stream.clock})

    def follow(self, mark: Mark) -> None:
        """Let the current stream do what comes only after the mark."""
        self._tracker.stream.follow(mark.clock)

    def finish(self, mark: Mark) -> None:
        """Note that the host waits."""
        self._tracker.order.host.follow(mark.clock)
        self._watch.note_wait("stream or event")

    def keep(self, tensor: Tensor, stream: Agent) -> None:
        """Note that a stream uses the memory after nobody has it any more."""
        self._tracker.order.keep(key_of(tensor), stream)
