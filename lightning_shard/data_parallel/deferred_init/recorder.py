"""Sees what happens to tensors on meta while a module is built, and notes it on a tape.

    to_meta=True     new tensors are on meta: `trainer.init_module(empty_init=True)`
    to_meta=False    those that code puts there itself: `torch.device("meta")` in configure_model

To the code that builds the module its tensors are on the CPU: initialisers that do nothing on meta
(torch's `trunc_normal_`, Hugging Face's `init_weights`) do what they would. Tensors that are made
of data or count something have their elements at once. Hugging Face's `from_pretrained`, which uses
meta itself and ends with values, is left alone.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_shard.core.registration import after_import
from lightning_shard.core.states import having
from lightning_shard.core.tensor_calls import Args
from lightning_shard.data_parallel.deferred_init.tape import (
    Tape,
    has_meta_tensors,
    note_recipes,
    recipe_of,
)
from lightning_shard.data_parallel.torch_private import TorchDispatchMode, without_function_modes

_META = torch.device("meta")
_CPU = torch.device("cpu")
_MAKING = {
    *(torch.empty, torch.empty_strided, torch.empty_permuted, torch.zeros, torch.ones),
    *(torch.full, torch.eye, torch.rand, torch.randn, torch.randint),
}
_COUNTING = {
    *(torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.arange),
    *(torch.range, torch.linspace, torch.logspace, torch.randperm, torch.tril_indices),
    *(torch.triu_indices, torch.bartlett_window, torch.blackman_window, torch.hamming_window),
    *(torch.hann_window, torch.kaiser_window, torch.fft.fftfreq),
}
_AS_ON_CPU: dict[Any, Any] = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: _CPU,
}
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
LOADERS = {
    "transformers.modeling_utils": "PreTrainedModel",
    "transformers.models.auto.modeling_auto": "AutoBackbone",
    "transformers.models.timm_backbone.modeling_timm_backbone": "TimmBackbone",
}
"""By module, the class whose `from_pretrained` reads values itself."""
_current: ContextVar[Tape | None] = ContextVar("tape", default=None)
_is_loading: ContextVar[bool] = ContextVar("loading", default=False)


def current_tape() -> Tape | None:
    """Return the tape of the module that is being built; None at other times."""
    return _current.get()


def read_at_start(tensor: Tensor, read: Callable[[], Tensor]) -> bool:
    """Note, while a module is built on meta, that all values of a tensor of it are read later.

    Returns:
        Whether that was noted; False for a tensor with elements, and where nothing is noted.
    """
    tape = current_tape()
    with without_function_modes():
        if tape is None or not tensor.is_meta:
            return False
        tape.note_read(tensor, read)
    return True


@contextmanager
def recording(*, to_meta: bool, strategy: Any = None) -> Iterator[None]:
    """Note inside what happens to tensors on meta; after it, modules know their values' recipes.

    Inside another such context, that one notes.

    Args:
        to_meta: Whether new tensors are made on meta where nothing else is said.
        strategy: Its module's parts are noted, too, when the context ends.
    """
    seen: dict[nn.Module, None] = {}
    tape = Tape()
    with ExitStack() as stack:
        is_outer = current_tape() is None
        if is_outer:
            stack.enter_context(_registered(seen))
            stack.enter_context(noting(tape))
        if to_meta:
            stack.enter_context(_ToMeta())
        yield
    module = getattr(strategy, "lightning_module", None)
    if is_outer:
        note_recipes([*seen, *([] if module is None else [module])], tape)


@contextmanager
def noting(tape: Tape) -> Iterator[None]:
    """Note inside what happens to tensors on meta that exist."""
    with having(_current, tape), _Recorder(tape):
        yield
    tape.forget_values()


@contextmanager
def noting_changes(module: nn.Module) -> Iterator[None]:
    """Note inside what is loaded into a module that is on meta; nothing for any other."""
    if not has_meta_tensors(module):
        yield
        return
    tape = Tape()
    with noting(tape):
        yield
    note_recipes([module], tape)


@contextmanager
def _registered(seen: dict[nn.Module, None]) -> Iterator[None]:
    """Collect the modules that parts are registered with inside, and those parts."""

    def of_tensor(module: nn.Module, name: str, value: Any) -> None:
        seen[module] = None

    def of_module(module: nn.Module, name: str, part: Any) -> None:
        seen.update({module: None} if part is None else {module: None, part: None})

    handles = [
        register_module_parameter_registration_hook(of_tensor),
        register_module_buffer_registration_hook(of_tensor),
        register_module_module_registration_hook(of_module),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    """Sends what concerns meta tensors to the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape, self._noting = tape, _Noting(tape)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = any(map(self._is_noted, tree_leaves((args, kwargs))))
        if not (given or _is_meta(kwargs)) or _is_loading.get():
            return func(*args, **kwargs)
        if func in _AS_ON_CPU:
            return _AS_ON_CPU[func] if self._is_known(args[0]) else func(*args, **kwargs)
        if func in _READING:
            return _read_only(func(self._tape.read(args[0]), *args[1:], **kwargs))
        if func in _COUNTING and not given:
            return func(*args, **{**kwargs, "device": _CPU})
        with self._noting:
            return func(*args, **kwargs)

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether a meta tensor has values to come; any other the code itself has on meta."""
        return recipe_of(tensor) is not None or self._tape.is_made(tensor)

    def _is_noted(self, value: Any) -> bool:
        is_on_meta = isinstance(value, Tensor) and value.device == _META
        return is_on_meta and not self._tape.leaves(value)


class _ToMeta(TorchFunctionMode):
    """Makes new tensors on meta; those that code puts there itself are left to it."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MAKING and kwargs.get("device") is None and not _is_loading.get():
            kwargs["device"] = _META
        elif func in _MAKING and _is_meta(kwargs) and (tape := current_tape()) is not None:
            with without_function_modes():
                return tape.leave(func(*args, **kwargs))
        return func(*args, **kwargs)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that it sees."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        with without_function_modes():
            return self._tape.do(func, args, dict(kwargs or {}))


def _read_only(read: Any) -> Any:
    """Return what was read, whose changes would not be the tensor's: an array refuses them."""
    if isinstance(read, np.ndarray):
        read.flags.writeable = False
    return read


def _is_meta(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device) == _META


def _mark_loading(module: str, kind: str) -> None:
    """Let `from_pretrained` of a class say that it loads."""
    loader: Any = getattr(sys.modules[module], kind)
    marked = having(_is_loading, value=True)(loader.from_pretrained.__func__)
    loader.from_pretrained = classmethod(marked)


for module, kind in LOADERS.items():
    after_import(module, partial(_mark_loading, module, kind))
