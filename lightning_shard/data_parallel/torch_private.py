"""The two private names of torch that the engine needs, and nothing else.

`tests/data_parallel/test_torch_private.py` fails when upstream changes them.
"""

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread is inside an autograd graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has finished; only from inside one."""
    Variable._execution_engine.queue_callback(callback)
