"""Sees every operation on the device, and counts what a GPU would make the host wait for.

    item, bool, float, tolist     the host waits for the value
    nonzero, unique, x[mask]      it waits for the shape of the result
    .cpu(), copies to the host    it waits for the copy, unless it is non_blocking
    copies from pageable memory   it waits until they have been staged; x[0] = 1.0 is one
    event or stream synchronize   it waits
    operations on two devices     fail, but for a number on the CPU
    pin_memory, is_pinned         are answered: a build for CPUs has no pinned memory

A wait that is found is counted with where it comes from, and answered, so that the step goes on
and shows the rest.
"""

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.data_parallel.torch_private import without_function_modes
from tests.gpu_like.contents import Contents
from tests.gpu_like.device import NAME, is_here
from tests.gpu_like.tracking import Tracker

_aten = torch.ops.aten
_REPOSITORY = Path(__file__).parents[2]
_PACKAGE = f"{_REPOSITORY}/lightning_shard/"
_WATCHERS = ("tests/gpu_like/", "tests/gpu/")
_BETWEEN = ("_ops.py", "eval_frame.py", "_compile.py", "warnings.py")  # of who asks and who watches
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
# Whole numbers, such as indices, may select on a GPU from the host's memory: it is copied first.
_PLAIN_DISPATCH = (torch._C._disabled_torch_dispatch_impl, FakeTensor.__torch_dispatch__)
# A tensor of shape () on the host is a number to these, as to all that works by elements.
_TAKES_NUMBERS: tuple[Any, ...] = (_aten.fill_.Tensor,)
_LEAVES_CONTENTS = ("c10d", "_c10d_functional")


class Wait(NamedTuple):
    """One place that has the host wait for the device.

    Attributes:
        upstream: Line of another package from which the operation came, or "".
    """

    what: str
    place: str
    upstream: str


class Watch(TorchDispatchMode):
    """Carries out operations on the device, which has no elements, and counts waits.

    Attributes:
        mixed: The errors of operations on two devices: what calls a backward may get another one,
            as torch's guard cannot call Python while an error is on its way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Wait] = Counter()
        self.num_operations = 0
        self.mixed: list[RuntimeError] = []
        self._is_counting = False
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.contents = Contents()
        self._pinned: set[int] = set()
        self.tracker = Tracker(lambda one: is_here(one) and not self._is_pinned(one), _place)

    def __enter__(self) -> "Watch":
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(1, device=...)` copies
        self._tolist, cast(Any, FakeTensor).tolist = FakeTensor.tolist, self._listed()
        self._generator, cast(Any, torch).Generator = torch.Generator, _Generator
        self._apply, cast(Any, nn.Module)._apply = nn.Module._apply, _apply
        self._to, cast(Any, Tensor).to = Tensor.to, self._moved()
        self._setitem, cast(Any, Tensor).__setitem__ = Tensor.__setitem__, self._put_at()
        self.tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tracker.__exit__(*error)
        cast(Any, Tensor).__setitem__ = self._setitem
        cast(Any, Tensor).to = self._to
        cast(Any, nn.Module)._apply = self._apply
        cast(Any, torch).Generator = self._generator
        cast(Any, FakeTensor).tolist = self._tolist
        torch._C._set_only_lift_cpu_tensors(self._lifts)

    @contextmanager
    def counting(self, counts: bool = True) -> Iterator[None]:
        """Count the waits inside."""
        before, self._is_counting = self._is_counting, counts
        try:
            yield
        finally:
            self._is_counting = before

    def start_counting(self, counts: bool) -> None:
        """Count from here on, or count no more."""
        self._is_counting = counts

    def note(self, what: str) -> None:
        """Note that the host waits for the device."""
        self.tracker.wait()
        self.note_wait(what)

    def note_wait(self, what: str) -> None:
        """Note that the host waits for something else than all that is queued."""
        if self._is_counting:
            self.found[Wait(what, *where())] += 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out one operation; tensor classes do not see what is asked of tensors here."""
        if any(one.__torch_dispatch__ not in _PLAIN_DISPATCH for one in types):
            return NotImplemented  # such as a placeholder, which says by itself what happens
        with without_function_modes():
            named = dict(kwargs or {})
            result = self._dispatch(func, args, dict(named))
            tensors = [one for one in tree_leaves((args, named, result)) if isinstance(one, Tensor)]
            by_host = all(map(self._is_on_host, [one for one in tensors if one.ndim] or tensors))
            if by_host and not all(map(self._is_on_host, tensors)):
                self.tracker.wait()  # for a number, which has been copied to the host
            self.tracker.operation(func, args, named, result, by_host=by_host)
            return result

    def _dispatch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        tensors = [one for one in tree_leaves((args, named)) if isinstance(one, Tensor)]
        device = named.get("device")
        if not (any(map(is_here, tensors)) or getattr(device, "type", device) == NAME):
            return self._elsewhere(func, args, named)
        if any(map(is_here, tensors)) and all(map(self._is_on_host, tensors)):
            return self._on_pinned(func, args, named)
        self.num_operations += self._is_counting
        if func in _COPIES:
            return self._copy(func, args, named)
        if func is _aten._local_scalar_dense.default:
            self.note("item")
            return self.contents.read(args[0]).item()
        if func.namespace not in _LEAVES_CONTENTS:
            self._forget_written(func, args, named)
        if "barrier" in func.name():
            self.note("barrier")
        self._check_devices(func, tensors)
        result = self._carry_out(func, args, named)
        if func is _aten.eq.Tensor and not result.ndim:
            self.contents.sent(torch.ones((), dtype=torch.bool), result)  # nobody edits anything
        return result

    def _is_on_host(self, tensor: Tensor) -> bool:
        return not is_here(tensor) or self._is_pinned(tensor)

    def _listed(self) -> Callable[[Tensor], list[Any]]:
        def tolist(tensor: Tensor) -> list[Any]:
            if not self._is_on_host(tensor):
                self.note("tolist")
            return cast("list[Any]", self.contents.read(tensor).tolist())

        return tolist

    def _put_at(self) -> Callable[..., None]:
        """Return `Tensor.__setitem__`, which puts a number at one element by a pageable copy."""

        def put(tensor: Tensor, index: Any, value: Any) -> None:
            is_number = isinstance(value, (bool, int, float, complex))
            if is_number and is_here(tensor) and tensor[index].ndim == 0:
                self.note("copy from the host (pageable)")
            self._setitem(tensor, index, value)

        return put

    def _moved(self) -> Callable[..., Tensor]:
        """Return `Tensor.to`, by which the package copies host memory that seems to be here.

        Torch moves tensors to where others of the same memory are.
        """

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            is_asked = sys._getframe(1).f_code.co_filename.startswith(_PACKAGE)
            if not (is_asked and is_here(tensor) and self._is_pinned(tensor)):
                return self._to(tensor, *args, **kwargs)
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            if device is None or device.type != NAME:
                return self._to(tensor, *args, **kwargs)
            options = {"dtype": dtype or tensor.dtype, "device": device}
            return cast(Tensor, _aten._to_copy(tensor, **options, non_blocking=non_blocking))

        return to

    def _carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._fake:
            try:
                return func(*args, **kwargs)
            except DataDependentOutputException:
                self.note(func.name().removeprefix("aten::"))
                return True
            except DynamicOutputShapeException:
                self.note(func.name().removeprefix("aten::"))
                if func is not _aten.nonzero.default:
                    raise
                return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.long, device=NAME)

    def _elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation of the CPU; it answers what it knows nothing of: pinned memory.

        A parameter may show such memory, and torch lets none that is on a device of Python's show
        the CPU's. So large pinned memory is a tensor on the device, of which the host is known to
        be the owner.
        """
        if func is _aten._pin_memory.default:
            return self._pin(args[0].clone())
        if func is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        if kwargs.pop("pin_memory", False):
            with self._fake:
                return self._pin(func(*args, **{**kwargs, "device": torch.device(NAME, 0)}))
        return func(*args, **kwargs)

    def _on_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation of the host on pinned memory, whose results are the host's."""
        if func is _aten._local_scalar_dense.default:
            return self.contents.read(args[0]).item()
        device = kwargs.get("device")
        if func is _aten._to_copy.default and getattr(device, "type", None) == NAME:
            self._note_upload(args[0], bool(kwargs.get("non_blocking")))
            return self._carry_out(func, args, kwargs)
        with self.counting(False):
            args, kwargs = tree_map_only(Tensor, self._without_elements, (args, kwargs))
            result = self._carry_out(func, args, {**kwargs, **({"device": NAME} if device else {})})
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and is_here(one):
                self._pin(one)
        return result

    def _without_elements(self, tensor: Tensor) -> Tensor:
        if is_here(tensor) or not tensor.ndim:
            return tensor
        with self._fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=NAME
            )

    def _pin(self, tensor: Tensor) -> Tensor:
        key = int(tensor.untyped_storage()._cdata)
        if key not in self._pinned:
            self._pinned.add(key)
            self.tracker.pinned(tensor)
            weakref.finalize(tensor.untyped_storage(), self._pinned.discard, key)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return int(tensor.untyped_storage()._cdata) in self._pinned

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._to_copy.default:
            return self._converted(args[0], kwargs)
        target, source = args[:2]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if self._is_on_host(target):
            if not (non_blocking and self._is_pinned(target)):
                self.note("copy to the host")
            if is_here(target):
                return self._carry_out(func, args, kwargs)
            return target.copy_(self.contents.read(source))
        if not self._is_on_host(source):
            self.contents.written(target)
            return self._carry_out(func, args, kwargs)
        self._note_upload(source, non_blocking)
        if is_here(source):
            return self._carry_out(func, args, kwargs)
        with self._fake:
            func(target, torch.empty(source.shape, dtype=source.dtype, device=NAME))
        if source.shape == target.shape and target.numel() * target.itemsize == (
            target.untyped_storage().nbytes()
        ):
            self.contents.sent(source, target)
        return target

    def _converted(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        device = torch.device(kwargs.get("device") or source.device)
        dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if device.type == "cpu":
            if not non_blocking:  # torch then makes pinned memory for the result
                self.note("copy to the host")
            return self.contents.read(source).to(dtype)
        if is_here(source):
            return cast(Tensor, self._carry_out(_aten._to_copy.default, (source,), kwargs))
        self._note_upload(source, non_blocking)
        with self._fake:
            made = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=device)
        self.contents.sent(source, made)
        return made

    def _note_upload(self, source: Tensor, non_blocking: bool) -> None:
        if source.numel() and not (non_blocking and self._is_pinned(source)):
            kind = "pinned, but blocking" if self._is_pinned(source) else "pageable"
            self.note(f"copy from the host ({kind})")

    def _forget_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for one in tree_leaves(value):
                if isinstance(one, Tensor) and is_here(one):
                    self.contents.written(one)

    def _check_devices(self, func: Any, tensors: list[Tensor]) -> None:
        """Raise where an operation mixes devices, also where a GPU would copy and go on."""
        takes_numbers = torch.Tag.pointwise in func.tags or func in _TAKES_NUMBERS
        elsewhere = [
            one for one in tensors if self._is_on_host(one) and (one.ndim or not takes_numbers)
        ]
        here = [one for one in tensors if not self._is_on_host(one)]
        if all(map(is_here, elsewhere)) and not any(one.ndim for one in here):
            return  # an optimizer's step on the host counts in numbers that seem to be here
        if elsewhere and func.namespace == "aten":
            error = RuntimeError(
                f"{func.name()} on {NAME} got a tensor of shape {tuple(elsewhere[0].shape)} in the "
                f"host's memory, expected all of them on the device."
            )
            self.mixed.append(error)
            raise error


class _Generator(torch.Generator):
    """A generator for any device, on the CPU: a device that Python brings can have none."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls)


def where() -> tuple[str, str]:
    """Return the lines of the package that led here, innermost first, and that of another one."""
    own, upstream = [], ""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_REPOSITORY) and ".venv" not in path.parts:
            name = str(path.relative_to(_REPOSITORY))
            if not name.startswith(_WATCHERS):
                own.append(f"{name}:{frame.lineno} {frame.name}")
        elif not own and path.name not in _BETWEEN:
            upstream = upstream or f"{path.parent.name}/{path.name}:{frame.lineno} {frame.name}"
    return " < ".join(own[:4]), upstream


def _place() -> str:
    """Return the line of the package that led here, quickly."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return f"{path.removeprefix(_PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Convert a module's tensors, as `Module._apply`, which swaps fake ones and cannot here."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for param in module._parameters.values():
        with torch.no_grad():
            made = param if param is None else function(param)
        if made is not param and isinstance(made, FakeTensor):  # else to the host: stays here
            param.data = made
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module
