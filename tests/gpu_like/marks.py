"""The device's streams, as the package asks for them: nothing is queued, but waits are seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.gpu_like.watch import Watch


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream, or a mark on one.

    Attributes:
        device: The device.
    """

    device: torch.device


class WatchedStreams:
    """Streams of the device; `backends.streams.Streams` has what each method does.

    Args:
        watch: Is told when the host waits.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._current: list[Stream] = []

    def current(self, device: torch.device) -> Stream:
        """Return the current stream."""
        return self._current[-1] if self._current else Stream(device)

    def make(self, device: torch.device) -> Stream:
        """Return a new stream."""
        return Stream(device)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one inside."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def mark(self, stream: Stream) -> Stream:
        """Return a mark."""
        return Stream(stream.device)

    def follow(self, mark: Stream) -> None:
        """Do nothing: no time passes on the device."""

    def finish(self, mark: Stream) -> None:
        """Note that the host waits."""
        self._watch.note("stream or event")

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: there is no memory."""
