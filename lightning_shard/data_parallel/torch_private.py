"""All private names of torch that engine, pipelines, split layers and the dry run use.

`tests/data_parallel/test_torch_private.py` fails when upstream changes them.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _checkpoint_hook, _recomputation_hook

__all__ = [
    "ACCESS_TO_BACKWARD_HOOKS",
    "COMPILED_MODULE",
    "FAKE_TENSOR_LOGGER",
    "BatchNorm",
    "FakeTensorMode",
    "TorchDispatchMode",
    "check_batch_norm_input",
    "forget_forward_hooks",
    "gradient_hooks",
    "has_compiled_call",
    "in_backward",
    "innermost_function_mode",
    "is_checkpointing",
    "is_compiled_function",
    "is_composite",
    "is_persistent",
    "is_traced",
    "pass_for_parameter",
    "queue_after_backward",
    "saving_hook",
    "storage_key",
    "storage_uses",
    "untraced",
]

COMPILED_MODULE = "_orig_mod"  # where the wrapper of `torch.compile` keeps the module
FAKE_TENSOR_LOGGER = fake_tensor.__name__
_BACKWARD_HOOKS: Any = vars(torch._C.TensorBase)["_backward_hooks"]
ACCESS_TO_BACKWARD_HOOKS = (_BACKWARD_HOOKS.__get__, _BACKWARD_HOOKS.__set__)
F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Keep torch.compile out of a function: collectives of ours are nothing dynamo could trace."""
    return cast("F", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def is_traced() -> bool:
    """Whether torch.compile is looking at tensors now, to describe compiled code's inputs."""
    return torch._guards.TracingContext.try_get() is not None


def in_backward() -> bool:
    """Whether this thread is inside an autograd graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


def saving_hook() -> Callable[..., object] | None:
    """Return the innermost hook that gets the tensors autograd saves (a checkpoint's), or None.

    Every checkpoint of activations, and every recomputation of one, has its own.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_checkpointing(hook: Callable[..., object] | None) -> bool:
    """Whether a hook from `saving_hook` is a checkpoint's, or that of its recomputation."""
    name = getattr(hook, "__qualname__", "")
    return name.startswith((_checkpoint_hook.__name__, _recomputation_hook.__name__))


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has finished; only from inside one."""
    Variable._execution_engine.queue_callback(callback)


def gradient_hooks(param: Tensor) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """Return the hooks of a tensor's gradient, those of `register_hook`: the dictionary itself."""
    return param._backward_hooks or {}


def forget_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks before and after a module's forward."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        hooks.clear()


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` has made a function of another."""
    return hasattr(function, "_torchdynamo_orig_callable")


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of a module's own is part of its state dict."""
    return name not in module._non_persistent_buffers_set


def check_batch_norm_input(module: BatchNorm, batch: Tensor) -> None:
    """Raise as the module does for a batch with another number of dimensions."""
    module._check_input_dim(batch)  # type: ignore[no-untyped-call]


def pass_for_parameter(tensor: Any) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold for a tensor of another class."""
    tensor._is_param = True


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors of the same storage, even an empty one."""
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors, arrays and others hold the memory that a tensor lies in."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_composite(func: Any) -> bool:
    """Whether an operation is made of others, into which autograd takes it apart."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(func.has_kernel_for_dispatch_key(key))


def innermost_function_mode() -> TorchFunctionMode | None:
    """Return the mode that sees this thread's next tensor operation first; None without any."""
    mode: TorchFunctionMode | None = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode
