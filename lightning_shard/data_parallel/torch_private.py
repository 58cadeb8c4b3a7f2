"""The private names of torch that the engine and split layers need, and nothing else.

`tests/data_parallel/test_torch_private.py` fails when upstream changes them.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode, _get_current_function_mode

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Keep torch.compile out of a function: collectives of ours are nothing dynamo could trace."""
    return cast("F", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def is_traced() -> bool:
    """Whether torch.compile looks at tensors now, to describe what compiled code is given."""
    return torch._guards.TracingContext.try_get() is not None


def in_backward() -> bool:
    """Whether this thread is inside an autograd graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


def saving_hook() -> Callable[..., object] | None:
    """What autograd hands the tensors to that it would save now, such as a checkpoint's; or None.

    Every checkpoint of activations, and every recomputation of one, has its own.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has finished; only from inside one."""
    Variable._execution_engine.queue_callback(callback)


def innermost_function_mode() -> TorchFunctionMode | None:
    """Which mode sees this thread's next operation on tensors first; None without any."""
    mode: TorchFunctionMode | None = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode
