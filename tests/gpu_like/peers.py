"""What the other ranks of a pipeline say: recorded on CPU ranks, told on the device.

    in process    rank 0 <──objects, headers──> rank 1      a fit of the same model and strategy
                       │ recorded
    on the device      └──> the one rank that is there, call by call

Stages tell each other in small messages which tensors they need and of which shapes. A group that
talks to nobody cannot know that; all else that ranks exchange is the same for all of them.
"""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.pending import Pending

_LARGEST = 4096  # elements
Told = dict[str, deque[Any]]
"""By line that called, what came back from each of its calls, in order."""


@contextmanager
def recording() -> Iterator[dict[int, Told]]:
    """Record inside, by rank, what ranks of this process are told."""
    recorder = _Recorder()
    with ExitStack() as stack:
        for name in ("all_gather_object", "broadcast_object"):
            stack.enter_context(patch.object(Collectives, name, recorder.objects(name)))
        for name in ("recv", "broadcast"):
            stack.enter_context(patch.object(Collectives, name, recorder.tensors(name)))
        stack.enter_context(patch.object(Pending, "wait", recorder.wait()))
        yield recorder.told


class _Recorder:
    """Makes operations that record what the originals bring."""

    def __init__(self) -> None:
        self.told: dict[int, Told] = defaultdict(lambda: defaultdict(deque))
        self._awaited: dict[int, tuple[deque[Any], Tensor]] = {}

    def _place(self, line: str) -> deque[Any]:
        world = current_world()
        assert world is not None
        return self.told[world.scheduler.running.index][line]

    def objects(self, name: str) -> Callable[..., Any]:
        """Return an operation on objects."""
        operation = getattr(Collectives, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            line = caller()
            result = operation(*args, **kwargs)
            if "randomness.py" not in line:  # states of generators, which each device has others of
                self._place(line).append(result)
            return result

        return run

    def tensors(self, name: str) -> Callable[..., Pending]:
        """Return an operation on tensors, of which small ones are recorded once they are there."""
        operation = getattr(Collectives, name)

        def run(group: Collectives, tensor: Tensor, *args: Any, **kwargs: Any) -> Pending:
            line, is_async = caller(), kwargs.pop("async_op", False)
            pending: Pending = operation(group, tensor, *args, **kwargs, async_op=True)
            if is_message(tensor):
                self._awaited[id(pending)] = self._place(line), tensor
            if not is_async:
                pending.wait()
            return pending

        return run

    def wait(self) -> Callable[[Pending], None]:
        """Return `Pending.wait`, which records what has come."""
        finish = Pending.wait

        def run(pending: Pending) -> None:
            finish(pending)
            if id(pending) in self._awaited:
                place, tensor = self._awaited.pop(id(pending))
                place.append(tensor.detach().clone())

        return run


def caller() -> str:
    """Return the line that has called the operation in which this is called."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith("contextlib.py") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_message(tensor: Tensor) -> bool:
    """Whether a received tensor is one whose elements the receiver reads."""
    is_number = tensor.dtype in (torch.int64, torch.float64, torch.uint8)
    return is_number and tensor.ndim == 1 and tensor.numel() <= _LARGEST
