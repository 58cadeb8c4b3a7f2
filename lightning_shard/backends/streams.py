"""The order in which a device does what is asked of it: streams, their marks, pinned memory.

    host      launch  launch  launch ...      goes ahead, and waits for nothing that it need not
    stream    ▓▓▓▓▓▓  ▓▓▓▓▓▓  ▓▓▓▓▓▓          does things in their order
    side      ░░░░░░░░  ▓▓▓▓                  another stream: ordered by marks alone

Everything asynchronous that this package does itself goes through here. A CPU has no streams.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class CudaStreams:
    """The streams of CUDA devices; those of another type of device have its methods."""

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """Return the current stream of a device."""
        return torch.cuda.current_stream(device)

    def make(self, device: torch.device) -> torch.cuda.Stream:
        """Return a new stream of a device."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Make the context in which a stream is the current one."""
        return torch.cuda.stream(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event, a mark of all that is queued on a stream now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        """Have the current stream of the event's device wait for it."""
        torch.cuda.current_stream(mark.device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event) -> None:
        """Return once the event is reached: the host waits."""
        mark.synchronize()

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep a tensor's memory, once nobody has it, from others until a stream has used it."""
        tensor.record_stream(stream)


STREAMS: dict[str, CudaStreams] = {"cuda": CudaStreams()}
"""By the type of a device its streams."""


def streams_of(device: torch.device) -> CudaStreams | None:
    """Return the streams of a device; None where it has none."""
    return STREAMS.get(device.type)


def sent_up(message: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a small tensor of the host's on a device, without waiting for the device.

    A copy from pageable memory would wait for all that is queued before it. Without streams the
    result may be the message itself.
    """
    if streams_of(device) is None:
        return message.to(device)
    return message.pin_memory().to(device, non_blocking=True)


def mark_stream(tensors: Sequence[Tensor]) -> Any:
    """Mark the current stream of a tensor's device; None where there are no streams."""
    streams = streams_of(tensors[0].device) if tensors else None
    return None if streams is None else streams.mark(streams.current(tensors[0].device))


def mark_streams(tensors: Iterable[Tensor]) -> list[Any]:
    """Mark the current stream of each device that one of the tensors is on."""
    by_device = {tensor.device: tensor for tensor in tensors if tensor.device.type in STREAMS}
    return [mark_stream([tensor]) for tensor in by_device.values()]


def drain_streams(tensors: Iterable[Tensor]) -> None:
    """Return once all that is queued on the current streams of the tensors' devices is done."""
    for tensor in {one.device: one for one in tensors}.values():
        if (streams := streams_of(tensor.device)) is not None:
            streams.finish(mark_stream([tensor]))


def join_streams(marks: Iterable[Any]) -> None:
    """Have the current stream of each mark's device wait for it."""
    for mark in marks:
        if mark is not None:
            STREAMS[mark.device.type].follow(mark)
