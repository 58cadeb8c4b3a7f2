"""Deep copies in which functions belong to the copies, too.

Python copies what a bound method is bound to, but neither the function in it nor what functions
close over, and torch leaves behind what hangs on a parameter or an optimizer. So of a model in
which one of these stands, a copy would compute with the original:

    self.step = lambda x: self.net(x)                   a cell that holds the model
    self.loss = torch.compile(self.loss)                compiled code, as block.compile() makes it
    MethodType(partial(f, optimizer=...), self)         how LightningCLI sets configure_optimizers
    self.net.weight.register_hook(self.scale)           a parameter's hook

A function is made anew if it reaches what is copied, through its cells, its defaults or other
functions; any other is shared, as what it finds among its module's globals.

What each rank may have of its own though Python or torch refuse: a tensor that carries a graph is
copied detached, a lock is a new one, a file is opened again where it stands. A thread is refused.

A private name of Python's `copy` is used here, and some of torch's tensors; checked with Python
3.11 to 3.13 and torch 2.11 to 2.13, tests/environments/launchers/test_copy.py fails when they
change. So are those of torch.compile that copies of compiled code need.

A copy that fails leaves its way in the traceback, a frame of `copy.deepcopy` for each object, and
so the object is named. If it is an iterator that cannot be copied, its holder gets one that can be.
"""

import copy
import inspect
import io
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import ReferenceType

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from lightning_shard.core.call_site import calls_through

_TABLES = ("_parameters", "_buffers", "_modules")


def way_of(error: Exception) -> list[Any]:
    """Return the objects whose deep copy an error has ended, from the outermost to the culprit."""
    copies = copy.deepcopy.__code__
    return [values["x"] for code, values in calls_through(error) if code is copies]


def name_of(way: list[Any], names: Mapping[int, str], default: str) -> str:
    """Return the dotted name of a way's last object, from the last one on that has a name by id."""
    start = max((i for i, one in enumerate(way) if id(one) in names), default=None)
    if start is None:
        return default
    name, is_state = names[id(way[start])], False
    for holder, held in itertools.pairwise(way[start:]):
        found = [key for key, value in _entries(holder) if value is held]
        if found and found[0] not in _TABLES:
            is_item = isinstance(holder, (Mapping, list, tuple)) and not is_state
            name += f"[{found[0]!r}]" if is_item else f".{found[0]}"
        is_state = not found or found[0] in _TABLES  # what holds an object's attributes
    return f"{name}, a {type(way[-1]).__name__},"


def _entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(holder, Mapping):
        return list(holder.items())
    if isinstance(holder, (list, tuple)):
        return enumerate(holder)
    return list(getattr(holder, "__dict__", {}).items())


class _Stream(Iterator[Any]):
    """An iterator whose copies go on where it stands, each through all the items."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Stream":
        return _Stream(copy.copy(self._items))


def exchange_iterator(way: list[Any]) -> Any:
    """Give the holder of the iterator that has ended a deep copy one that can be copied."""
    for depth in range(len(way) - 1, 0, -1):
        iterator = way[depth]
        if isinstance(iterator, tuple):  # what an iterator over it is made of
            continue
        if not isinstance(iterator, Iterator):
            return None
        places = [(one, key) for one in way[:depth] for key, it in _entries(one) if it is iterator]
        stream = _Stream(itertools.tee(iterator, 1)[0])
        for holder, key in places:
            if isinstance(holder, (dict, list)):
                holder[key] = stream
            elif not isinstance(holder, tuple):
                object.__setattr__(holder, key, stream)
        if any(not isinstance(holder, tuple) for holder, _ in places):
            return iterator
    return None


_T = TypeVar("_T")
_Memo = dict[int, Any]
_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


def copy_with_functions(value: Any, memo: _Memo, modules: Collection[nn.Module], more: Any) -> Any:
    """Return a deep copy in which functions belong to the copy, and hooks of modules' tensors do.

    Attributes of the modules' tensors are copied as well; `more` are further objects in the value
    that functions may hold.
    """
    parts = [part for module in modules for part in module.modules()]
    tensors = list(dict.fromkeys(t for m in modules for t in (*m.parameters(), *m.buffers())))
    copied = {id(one) for one in (*parts, *tensors, *more)}
    with _copying_functions(copied):
        result = copy.deepcopy(value, memo)
        for tensor, own_tensor in _with_copies(tensors, memo):
            _copy_attributes(tensor, own_tensor, memo)
            _copy_hooks(tensor, own_tensor, memo)
        for part, own in _with_copies(parts, memo):
            if part._compiled_call_impl is not None:  # by `module.compile()`
                own._compiled_call_impl = copy.deepcopy(part._compiled_call_impl, memo)
            if isinstance(part, ScriptModule):
                _mend_scripted(part, own)
            if is_parametrized(own):  # by properties of a class that is this module's alone
                kind: Any = type(own)
                own.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        optimizers = [one for one in memo.get(id(memo), ()) if isinstance(one, Optimizer)]
        copied.update(map(id, optimizers))  # a copy's memo keeps what it has copied alive there
        for optimizer, own_optimizer in _with_copies(optimizers, memo):
            _copy_attributes(optimizer, own_optimizer, memo)
            _copy_tables(optimizer, own_optimizer, memo)
    return result


@contextmanager
def _copying_functions(copied: Collection[int]) -> Iterator[None]:
    """Let deep copies inside make functions anew that reach an object of these ids."""
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]

    def copy_function(function: FunctionType, memo: _Memo) -> Any:
        if not _reaches(function, copied, set()):
            return function
        written = uncompiled(function)
        if written is not None:
            return compile_again(function, copy.deepcopy(written, memo))
        return _anew(function, memo, copied)

    own: dict[type, Any] = {
        FunctionType: copy_function,
        MethodType: _copy_method,
        BuiltinMethodType: _copy_builtin,
        ModuleType: lambda module, memo: module,
        **dict.fromkeys(_LOCKS, lambda lock, memo: _LOCKS[type(lock)]()),
        **dict.fromkeys(_FILES, _copy_file),
    }
    tensors = patch.object(Tensor, "__deepcopy__", _without_graph(Tensor.__deepcopy__))
    threads = patch.object(threading.Thread, "__deepcopy__", _refuse, create=True)
    with patch.dict(dispatch, own), tensors, threads:
        yield


def _without_graph(copier: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(copier)
    def copy_tensor(tensor: Tensor, memo: _Memo) -> Any:
        return copier(tensor, memo) if tensor.is_leaf else tensor.detach().clone()

    return copy_tensor


def _refuse(thread: threading.Thread, memo: _Memo) -> Any:
    raise TypeError(f"the copy of {thread.name!r} would not run")


def _copy_builtin(function: Any, memo: _Memo) -> Any:
    """Return the method of its object's copy, if that has one by now: a lock's `acquire`, say."""
    owner = memo.get(id(function.__self__))
    return function if owner is None else getattr(owner, function.__name__)


def _copy_file(file: Any, memo: _Memo) -> Any:
    if file.closed or file.writable():
        return file
    again = open(  # noqa: SIM115  (the copy's to close)
        file.name,
        file.mode,
        encoding=getattr(file, "encoding", None),
        errors=getattr(file, "errors", None),
    )
    again.seek(file.tell())
    return again


def _copy_method(method: MethodType, memo: _Memo) -> MethodType:
    owner = copy.deepcopy(method.__self__, memo)
    return type(method)(copy.deepcopy(method.__func__, memo), owner)


def _anew(function: FunctionType, memo: _Memo, copied: Collection[int]) -> FunctionType:
    def own(value: Any) -> Any:
        return copy.deepcopy(value, memo) if _reaches(value, copied, set()) else value

    old = function.__closure__ or ()
    pairs = [(cell, _own_cell(cell, memo, copied)) for cell in old]
    new = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        closure=tuple(cell for _, cell in pairs) or None,
    )
    memo[id(function)] = new  # it may reach itself
    new.__defaults__ = own(function.__defaults__)
    new.__kwdefaults__ = own(function.__kwdefaults__)
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    new.__doc__, new.__annotations__ = function.__doc__, function.__annotations__
    vars(new).update({name: own(value) for name, value in vars(function).items()})
    for before, cell in pairs:
        if cell is not before and _is_empty(cell):
            cell.cell_contents = _own_contents(before.cell_contents, memo)
    return new


def _own_contents(value: Any, memo: _Memo) -> Any:
    if isinstance(value, ReferenceType):
        return ReferenceType(copy.deepcopy(value(), memo))
    return copy.deepcopy(value, memo)


def _own_cell(cell: CellType, memo: _Memo, copied: Collection[int]) -> CellType:
    """Return the cell, or a new one if it reaches a copied object; functions may share it."""
    if _is_empty(cell) or not _reaches(cell.cell_contents, copied, set()):
        return cell
    own: CellType = memo.setdefault(id(cell), CellType())
    return own


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises if there is none)
    except ValueError:
        return True
    return False


def _reaches(value: Any, copied: Collection[int], seen: set[int]) -> bool:
    """Whether an object is, or holds, one of those that are copied."""
    if id(value) in copied:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_reaches(one, copied, seen) for one in held_by(value))


def held_by(value: Any) -> Iterable[Any]:
    """Return the objects that functions, partial functions, methods and containers hold."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__, vars(value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, ReferenceType):
        return [value()]
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def _with_copies(ones: Iterable[_T], memo: _Memo) -> Iterator[tuple[_T, _T]]:
    """Yield each object that was copied, with its copy."""
    for one in ones:
        copied = memo.get(id(one))
        if copied is not None and copied is not one:
            yield one, copied


def _copy_attributes(source: Any, target: Any, memo: _Memo) -> None:
    """Give a copy the attributes that a user, or a scheduler, has set on the original."""
    for name, value in vars(source).items():
        if name not in vars(target):
            setattr(target, name, copy.deepcopy(value, memo))


def _copy_hooks(tensor: Tensor, copied: Tensor, memo: _Memo) -> None:
    """Give a tensor's copy its hooks."""
    hooks = tensor._backward_hooks or {}
    late_hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    is_frozen = bool(hooks or late_hooks) and not copied.requires_grad
    if is_frozen:  # since it was given its hooks, which torch gives to what is trained only
        copied.requires_grad_()
    if not copied._backward_hooks:
        for hook in hooks.values():
            copied.register_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]
    if not (getattr(copied, "_post_accumulate_grad_hooks", None) or {}):
        for hook in late_hooks.values():
            copied.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]
    if is_frozen:
        copied.requires_grad_(False)


def _mend_scripted(part: ScriptModule, copied: nn.Module) -> None:
    """Let parameters of the copy of a scripted or traced module be leaves: torch computes them."""
    for param, own in zip(part.parameters(), copied.parameters(), strict=True):
        own.detach_().requires_grad_(param.requires_grad)
        own.__class__ = nn.Parameter


def _copy_tables(optimizer: Optimizer, copied: Optimizer, memo: _Memo) -> None:
    """Give an optimizer's copy its hooks, which lie in tables."""
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict) and not vars(copied)[name]:
            vars(copied)[name].update(copy.deepcopy(value, memo))


def uncompiled(function: FunctionType) -> Callable[..., Any] | None:
    """Return the function that `torch.compile` has compiled, or None for one it has not made."""
    if vars(function).get("_torchdynamo_wrapper_id") != id(function):
        return None
    written: Callable[..., Any] = vars(function)["_torchdynamo_orig_callable"]
    return written


def compile_again(compiled: FunctionType, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with the options with which another was compiled."""
    compiler = inspect.getclosurevars(compiled).nonlocals["self"]
    again: Callable[..., Any] = compiler(function)
    return again
