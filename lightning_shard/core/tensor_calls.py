"""What functions ask of tensors, in one table; how torch asks classes that compute for themselves.

    p.norm()   ──> __torch_function__ ──> called         what code asks, with autograd still to come
    aten.norm  ──> __torch_dispatch__ ──> dispatched     what is left of it below autograd

Every class that stands for elements elsewhere answers one of the two, or both, and reads the table:

    OF_FORMAT, OF_SHAPE        known without elements
    OF_OBJECT, OF_TRAINING     of the tensor object, which is the same wherever its elements are
    OF_GRAPH, SET_DATA ...     known by each class
    all others                 computed from elements: the full ones, but where a class knows better
    ---- by `name_of`:
    OF_MEMORY, MOVES_MEMORY    lead to a tensor's memory, or move it; `BY_OBJECT` keep it alive
    MADE_OF_ALL, PICKLES       make another object of all elements
    BY_PYTHON                  read and write each element by Python
    ---- what goes back to the elements:
    writes, changed_by         by torch's convention for names
    written_by                 by an operation's schema

Such a class has no memory of its own shape, and must not lead to another's: an address would be
that of garbage. Of `tensor.data = value` torch asks the tensor's class alone; the property that
this module puts in the place of `Tensor.data` asks the value's, too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.errors import ConfigError

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_TENSOR: Any = Tensor  # whose properties are descriptors, which type checkers do not know
_OWN_DATA = _TENSOR.data
SET_OWN_DATA: Callable[[Tensor, Tensor], None] = _OWN_DATA.__set__
"""Points a tensor at another, whose class is not asked."""


def _set_data(tensor: Tensor, value: Any) -> None:
    """Point a tensor at another, whose class torch does not ask: it may have no memory."""
    if has_torch_function((tensor,)) or not has_torch_function((value,)):
        SET_OWN_DATA(tensor, value)
    else:
        handle_torch_function(_TENSOR.data.__set__, (value,), tensor, value)


class _Data(property):
    """What torch and `name_of` ask a property of tensors for."""

    __name__, __objclass__ = "data", _OWN_DATA.__objclass__


_TENSOR.data = _Data(_OWN_DATA.__get__, _set_data)


def functions(names: str) -> frozenset[Any]:
    """Return functions by names, which blanks part: methods, also torch's own of such a name.

    Of a property it is what reads it, or with `=` behind its name what sets it.
    """
    found: set[Any] = set()
    for name in names.split():
        one = getattr(Tensor, name.rstrip("="))
        if callable(one):
            found |= {one, vars(torch).get(name, one)}
        else:
            found.add(one.__set__ if name.endswith("=") else one.__get__)
    return frozenset(found)


_KINDS = {one for one in dir(Tensor) if one.startswith("is_") and one != "is_leaf"}
_PROPERTIES = {one for one in _KINDS if not callable(getattr(Tensor, one))}  # is_cpu, is_sparse ...
OF_FORMAT = functions(" ".join(_PROPERTIES)) | functions(
    "dtype device layout itemsize element_size get_device "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference"
)
OF_SHAPE = functions(
    "shape ndim nbytes size dim ndimension numel nelement __len__ stride is_contiguous"
)
OF_TRAINING = functions("requires_grad requires_grad= requires_grad_ detach_")
OF_OBJECT = OF_TRAINING | {_TENSOR.grad.__delete__}
OF_OBJECT |= functions(
    "grad grad_fn is_leaf retains_grad _version output_nr name __hash__ register_hook retain_grad "
    "register_post_accumulate_grad_hook _post_accumulate_grad_hooks _post_accumulate_grad_hooks= "
    "_backward_hooks _backward_hooks="
)
OF_GRAPH = functions("backward") | {torch.autograd.backward, torch.autograd.grad}
(GET_DATA,), (SET_DATA,), (SET_GRAD,) = map(functions, ("data", "data=", "grad="))

BY_OBJECT = frozenset({"numpy", "array", "dlpack", "to_dlpack"})
OF_MEMORY = BY_OBJECT | {
    *("data_ptr", "const_data_ptr", "untyped_storage", "storage", "typed_storage", "is_set_to"),
    "cuda_array_interface",
}
MOVES_MEMORY = frozenset({"share_memory", "swap_tensors"})
MADE_OF_ALL = frozenset({"tolist", "as_subclass"})
PICKLES = frozenset({"reduce", "reduce_ex"})
BY_PYTHON = frozenset({"apply", "map", "map2"})


def name_of(func: Any) -> str:
    """Return the name of a function, or of the property that it reads, without underscores."""
    name, read = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    return str(getattr(read, "__name__", name) if name == "__get__" else name).strip("_")


def writes(func: Any) -> bool:
    """Whether a function changes its first argument, by torch's convention for names."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _READING)
    return name.endswith("_")


_READING = ("__index__", "__int__", "__invert__", "__iter__")  # the others are __iadd__ and so on


def changed_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a function changes, several tensors where it is of a list.

    Functions of `nn.init` are asked with all their arguments by name, the tensor first.
    """
    out = kwargs.get("out")
    first = next(iter((*args, *kwargs.values())), None)
    changed = first if out is None and writes(func) else out
    return [] if changed is None else tree_leaves(changed)


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (i, one.name) for i, one in arguments if one.alias_info and one.alias_info.is_write
    )


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation of torch's writes to."""
    places = _places_written(func)
    given = [args[index] if index < len(args) else kwargs.get(name) for index, name in places]
    return found_in(Tensor, given)


BY_ADDRESS = frozenset(
    getattr(Tensor, name)
    for name in dir(Tensor)
    if name.strip("_") in (OF_MEMORY | MOVES_MEMORY) - BY_OBJECT
)
"""Functions after which user code may hold nothing but an address."""


def memory_refused(func: Any, tensor: Tensor, held: str) -> ConfigError:
    """Return the error for a call that asks for memory of elements; `held` says where they are."""
    return ConfigError(
        f"{name_of(func)}() was called of a tensor of shape {tuple(tensor.shape)} in a step, but "
        f"{held}; expected code that computes with it. Ask for the memory of parameters in a hook, "
        f"such as on_train_batch_end, on every rank."
    )


_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format}


def map_only(kinds: Any, made: Callable[[Any], Any], values: Any) -> Any:
    """Do as torch's `tree_map_only`, in a third of the time for what functions are mostly given."""
    if isinstance(values, kinds):
        return made(values)
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([map_only(kinds, made, one) for one in values])
    if kind is dict:
        return {key: map_only(kinds, made, one) for key, one in values.items()}
    is_leaf = kind in _LEAVES or isinstance(values, Tensor)
    return values if is_leaf else tree_map_only(kinds, made, values)


def found_in(kinds: Any, values: Any) -> list[Any]:
    """Return the leaves of some kinds among values, in their order."""
    found: list[Any] = []
    map_only(kinds, found.append, values)
    return found


class Exchanged:
    """Tensors that a function computes with in the place of others: full ones, or what is here.

    Attributes:
        pairs: By the id of the tensor, it and what stands in its place, which is made once.
    """

    def __init__(self, kinds: Any, made: Callable[[Any], Any]) -> None:
        self._kinds, self._made = kinds, made
        self.pairs: dict[int, tuple[Any, Any]] = {}

    def given(self, values: Any) -> Any:
        """Return values with others in the place of tensors of the kinds."""
        return map_only(self._kinds, self._other, values)

    def _other(self, one: Any) -> Any:
        if id(one) not in self.pairs:
            self.pairs[id(one)] = one, self._made(one)
        return self.pairs[id(one)][1]

    def returned(self, result: Any) -> Any:
        """Return a result with the tensors themselves in the place of others."""
        back = {id(other): one for one, other in self.pairs.values()}
        return map_only(Tensor, lambda one: back.get(id(one), one), result)


class SeesCalls(Tensor):
    """Tensors whose class computes what is called with one of them among the arguments."""

    @classmethod
    def called(cls, func: Function, types: Sequence[type], args: Args, kwargs: Kwargs) -> Any:
        """Return the result of a call; NotImplemented lets another class among `types` do it."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Take a call from torch."""
        return cls.called(func, types, tuple(args), dict(kwargs or {}))


class SeesOperations(Tensor):
    """Tensors whose class computes the operations below autograd on them."""

    @classmethod
    def dispatched(cls, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of an operation of torch's."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Take an operation from torch."""
        return cls.dispatched(func, tuple(args), dict(kwargs or {}))
