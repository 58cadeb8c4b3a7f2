"""All private names of torch, and two of transformers, that these rooms use.

`tests/data_parallel/test_torch_private.py` fails when upstream changes them.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from gc import get_objects
from itertools import chain
from sys import getrefcount
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as of_modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as DropoutLayer
from torch.optim import Optimizer
from torch.optim import optimizer as of_optimizers
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _checkpoint_hook, _recomputation_hook
from torch.utils.hooks import RemovableHandle

from lightning_shard.core.modules import is_scripted

__all__ = ["BatchNorm", "DropoutLayer", "FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

GRAPH_ENDS = "ranks of lightning_shard exchange here: leave fullgraph=True out"  # torch quotes it
COMPILED_MODULE = "_orig_mod"  # where the wrapper of `torch.compile` keeps the module
GENERATES = "_has_unfinished_sequences"
GENERATES_TOGETHER = "_is_fsdp_managed_module"
FAKE_TENSOR_LOGGER = fake_tensor.__name__
OF_ORIGINAL = "_orig"  # ends the name of a parameter that `spectral_norm` and `prune` compute from
_OF_ASKING = 4  # uses of and references to a storage while `storage_uses` has it in Python
_OF_A_GRAPH = 4  # references to a tensor that no code of Python has but this search
_OF_A_LIST = 2  # references: the list's, and that of the function which counts
MAY_SHARE_DATA: Any = torch._has_compatible_shallow_copy_type  # `Module._apply` asks it
INITIALISERS = ("reset_parameters", "_reset_parameters")  # of torch's layers, by their name
_HOOKS_OF_ALL_OPTIMIZERS: tuple[dict[int, Any], ...] = (
    of_optimizers._global_optimizer_pre_hooks,
    of_optimizers._global_optimizer_post_hooks,
)
F = TypeVar("F", bound=Callable[..., Any])
Hook = Callable[..., Any]


# whether `torch.func.grad`, `vmap` or another transform runs now that wraps tensors
wraps_tensors: Callable[[], bool] = torch._C._are_functorch_transforms_active
# whether a tensor stands for the rows of a gradient that `torch.autograd.grad` takes together
is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
# whether a transform has made a tensor
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
# a context in which no transform wraps tensors
outside_transforms: Callable[[], AbstractContextManager[Any]] = temporarily_clear_interpreter_stack


def in_transform() -> bool:
    """Whether a transform of a function runs now, or a forward derivative."""
    return wraps_tensors() or forward_ad._current_level >= 0


def is_recorded_as_graph() -> bool:
    """Whether `torch.func.linearize` or another caller of `make_fx` notes all operations now."""
    return proxy_tensor.get_proxy_mode() is not None


# the functions by which tensors enter a transform, each with its module
TRANSFORM_ENTRANCES = (
    (vmap, "_add_batch_dim"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "_jvp_with_argnums"),
)

# whether subclasses of tensors see now what is done to them, by `__torch_function__`
sees_subclasses: Callable[[], bool] = torch._C._is_torch_function_enabled


_AUTOGRAD: Any = torch.autograd
_ENGINE: Callable[..., Any] = _AUTOGRAD._engine_run_backward


def exchange_engine_entrance(entrance: Callable[..., Any] | None) -> None:
    """Let `torch.autograd.grad` and `backward` enter autograd's engine through a function."""
    through = _ENGINE if entrance is None else partial(entrance, _ENGINE)
    _AUTOGRAD._engine_run_backward = through


def untraced(function: F) -> F:
    """Keep torch.compile out of a function: collectives of ours are nothing dynamo could trace."""
    out = torch.compiler.disable(function, reason=GRAPH_ENDS)  # type: ignore[no-untyped-call]
    return cast("F", out)


def untraced_alone(function: F) -> F:
    """Keep torch.compile out of a function, but not out of those that it calls."""
    return cast("F", torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


class Untraced:
    """A context that torch.compile does not see being entered and left; it sees what is inside."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    @untraced
    def __enter__(self) -> Any:
        return self._context.__enter__()

    @untraced
    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def put_next_to_step(optimizer: Optimizer, first: RemovableHandle, last: RemovableHandle) -> bool:
    """Let two hooks be next to the step of an optimizer; return whether users have others."""
    tables: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    tables[0].move_to_end(first.id)
    tables[1].move_to_end(last.id, last=False)
    hooks = chain(*(one.values() for one in (*tables, *_HOOKS_OF_ALL_OPTIMIZERS)))
    return any(not str(hook.__module__).startswith("lightning_shard.") for hook in hooks)


def is_traced() -> bool:
    """Whether torch.compile is looking at tensors now, to describe compiled code's inputs."""
    return torch._guards.TracingContext.try_get() is not None


def in_backward() -> bool:
    """Whether this thread is inside an autograd graph task."""
    return bool(torch._C._current_graph_task_id() != -1)


def saving_hook() -> Callable[..., object] | None:
    """Return the innermost hook of what autograd saves, of a checkpoint or none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Inside, autograd saves tensors as they are: a checkpoint around does not hear of them."""
    kept: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        kept.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(kept):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_checkpointing(hook: Callable[..., object] | None) -> bool:
    """Whether a hook from `saving_hook` is a checkpoint's, or that of its recomputation."""
    name = getattr(hook, "__qualname__", "")
    return name.startswith((_checkpoint_hook.__name__, _recomputation_hook.__name__))


@contextmanager
def unobserved() -> Iterator[None]:
    """Let no checkpoint of activations see the operations inside, nor what autograd saves there."""
    with saved_tensors_hooks(_same, _same), _disable_current_modes():
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def versions_shared() -> AbstractContextManager[None]:
    """Make a context, for a dispatch mode, in which views count changes with what they are of."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has finished; only from inside one."""
    Variable._execution_engine.queue_callback(callback)


def gradient_hooks(param: Tensor) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """Return the hooks of a tensor's gradient, those of `register_hook`: the dictionary itself."""
    return param._backward_hooks or {}


def after_gradient(param: Tensor) -> dict[int, object] | None:
    """Return the hooks that are called once a gradient has been added up: the dictionary itself."""
    return getattr(param, "_post_accumulate_grad_hooks", None)


TELLS_OF_ARRIVAL = "tells_of_arrival"
"""Set on an engine's hook; in a dry run a parameter has one for each stage."""


def hooks_after_gradient(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks that are called once a gradient has been added up."""
    return cast("list[Callable[[Tensor], None]]", [*(after_gradient(param) or {}).values()])


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether code is called with a parameter's gradient, or once it has been added up."""
    return bool(param._backward_hooks or hooks_after_gradient(param))


def forget_gradient_hooks(param: Tensor) -> None:
    """Remove all hooks of a parameter's gradient."""
    for hooks in (param._backward_hooks, after_gradient(param)):
        (hooks or {}).clear()


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether anybody has registered a backward hook on a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def forget_backward_hooks(module: nn.Module) -> None:
    """Take the backward hooks off a module."""
    for hooks in (module._backward_hooks, module._backward_pre_hooks):
        hooks.clear()


def forget_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks before and after a module's forward."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        hooks.clear()


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` was applied to a module, in one of its two ways."""
    return COMPILED_MODULE in module._modules or has_compiled_call(module)


def calls_of(module: nn.Module) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """Return the compiled call of a module, None without one, and that of it as it is written."""
    return module._compiled_call_impl, module._call_impl


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks before and after a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a module be called by another compiled call; None for as it is written."""
    module._compiled_call_impl = call


def compiler_of(module: nn.Module) -> Callable[[F], F]:
    """Return what compiles a function as a module is compiled."""
    context = vars(module).get("dynamo_ctx")
    if context is None:
        context = inspect.getclosurevars(module._compiled_call_impl).nonlocals["self"]  # type: ignore[arg-type]
    return cast("Callable[[F], F]", context)


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` has made a function of another."""
    return hasattr(function, "_torchdynamo_orig_callable")


def children_of(modules: Iterable[nn.Module]) -> list[dict[str, nn.Module | None]]:
    """Return the dictionary in which each module holds its children; a scripted one has none."""
    return [module._modules for module in modules if not is_scripted(module)]


def with_buffers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold buffers of their own."""
    return [module for module in modules if module._buffers]


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of a module's own is part of its state dict."""
    return name not in getattr(module, "_non_persistent_buffers_set", ())  # scripted: all are


def check_batch_norm_input(module: BatchNorm, batch: Tensor) -> None:
    """Raise as the module does for a batch with another number of dimensions."""
    module._check_input_dim(batch)  # type: ignore[no-untyped-call]


def exchange_contents(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two tensor objects are, but for their attributes and who refers to them."""
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} is in a graph")
    torch._C._swap_tensor_impl(tensor, other)


def pass_for_parameter(tensor: Any) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold for a tensor of another class."""
    tensor._is_param = True


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors of the same storage, even an empty one."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors, arrays and others hold the memory that a tensor lies in."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) + getrefcount(storage) - _OF_ASKING


def tensors_at(memory: Tensor) -> list[Tensor]:
    """Return the tensors in a memory that Python code has, not graphs alone, by a long search."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    found = [one for one in get_objects() if type(one) in (Tensor, nn.Parameter)]
    found = [one for one in found if torch._C._has_storage(one) and begin <= one.data_ptr() < end]
    return [one for one in found if one._use_count() == 1 or getrefcount(one) > _OF_A_GRAPH]


# whether the backward that runs leaves its graph for another one
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def count_saved(memory: Tensor, ends: Iterable[Tensor], most: int) -> int:
    """Return how often graphs with these ends have saved a memory, the newest first; at most so."""
    key, found, seen, nodes = storage_key(memory), 0, set[Any](), [one.grad_fn for one in ends]
    while nodes and found < most:
        node: Any = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
        saved = [one.data for one in tree_leaves(raw)]  # packed, if hooks have packed it
        found += sum(isinstance(one, Tensor) and storage_key(one) == key for one in saved)
        nodes += [one for one, _ in node.next_functions]
    return found


def kept_by_contexts(memory: Tensor, ends: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors at a memory that contexts of autograd functions in graphs have kept.

    A function may set them on its context, and not save them: torch neither counts nor frees them.
    """
    key, found, seen, nodes = storage_key(memory), [], set[Any](), [one.grad_fn for one in ends]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves = tree_leaves([*getattr(node, "__dict__", {}).values()])
        found += [one for one in leaves if isinstance(one, Tensor) and storage_key(one) == key]
        nodes += [one for one, _ in node.next_functions]
    return found


def are_held_alone(tensors: list[Tensor]) -> bool:
    """Whether nobody but a list holds its tensors; others may hold their memory."""
    references, uses = map(getrefcount, tensors), map(Tensor._use_count, tensors)  # type: ignore[attr-defined]
    return max(references, default=0) <= _OF_A_LIST and max(uses, default=0) <= 1


def is_composite(func: Any) -> bool:
    """Whether an operation is made of others, into which autograd takes it apart."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(func.has_kernel_for_dispatch_key(key))


def without_function_modes() -> AbstractContextManager[None]:
    """Make a context in which no mode and no tensor class sees what is done to tensors."""
    return torch._C.DisableTorchFunction()


def innermost_function_mode() -> TorchFunctionMode | None:
    """Return the mode that sees this thread's next tensor operation first; None without any."""
    mode: TorchFunctionMode | None = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries of hooks that run around a module's forward and backward."""
    return [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ]


GLOBAL_HOOKS = [
    of_modules._global_forward_hooks,
    of_modules._global_forward_pre_hooks,
    of_modules._global_backward_hooks,
    of_modules._global_backward_pre_hooks,
]
"""As `hooks_of` a module, those of all modules of the process."""


def is_called_plainly(module: nn.Module, looks: Callable[[Any], bool]) -> bool:
    """Whether no hooks run around a module's forward and backward that look at values."""
    own = (*hooks_of(module), *GLOBAL_HOOKS)
    return not any(own) or not any(looks(one) for hooks in own for one in hooks.values())


def without_hooks(*modules: nn.Module) -> AbstractContextManager[None]:
    """Call modules inside without their hooks, and without those of all modules of the process."""
    return set_aside([*GLOBAL_HOOKS, *(hooks for one in modules for hooks in hooks_of(one))])


@contextmanager
def set_aside(
    every: Iterable[dict[int, Any]], goes: Callable[[Any], bool] = lambda hook: True
) -> Iterator[None]:
    """Take hooks out of their dictionaries inside, all or some."""
    before = [(hooks, dict(hooks)) for hooks in every]
    for hooks, known in before:
        for key in [key for key, hook in known.items() if goes(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, known in before:
            added = dict(hooks)
            hooks.clear()
            hooks.update(known | added)
