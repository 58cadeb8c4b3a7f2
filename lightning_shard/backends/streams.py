"""CUDA order between ranks: results are computed on one rank's stream, and read on the others'.

Each caller marks its stream, the computing rank's stream waits for those marks, and a rank that
waits for the work has its stream wait for the result's mark. CPU tensors need none of this.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def mark_stream(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Record an event on the current stream, if the tensors are CUDA's."""
    if not tensors or not tensors[0].is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensors[0].device))
    return event


def mark_streams(tensors: Iterable[Tensor]) -> list[torch.cuda.Event | None]:
    """Record an event on the current stream of each device that one of the tensors is on."""
    by_device = {tensor.device: tensor for tensor in tensors if tensor.is_cuda}
    return [mark_stream([tensor]) for tensor in by_device.values()]


def drain_streams(tensors: Iterable[Tensor]) -> None:
    """Return once all that is queued on the current streams of the tensors' devices is done."""
    for event in mark_streams(tensors):
        if event is not None:
            event.synchronize()


def join_streams(events: Iterable[torch.cuda.Event | None]) -> None:
    """Have the current stream of each event's device wait for it."""
    for event in events:
        if event is not None:
            torch.cuda.current_stream(event.device).wait_event(event)
