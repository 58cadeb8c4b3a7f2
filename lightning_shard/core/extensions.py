"""What a run adds to objects of its user's, and takes off again: methods, classes of modules.

A run extends classes of modules by mixins, and gives them back in any order. Several dimensions may
extend the class of one module: a pipeline a block, experts the same block, which is a mixture.

    Block  ->  (_Caught, Block)  ->  (_Mixing, (_Caught, Block))
                                     without _Caught: (_Mixing, Block)

A copy of the module has the same class; what the run has put into it says by `__deepcopy__` what
the copy gets. A method is replaced for the time of a context by a plain function, which copies of
its object share.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakKeyDictionary, ref

from torch import nn

_OF_EVERY_CLASS = ("__dict__", "__weakref__")


class ModuleCopies:
    """Notices the copies of modules that user code makes in a run, and copies of those.

    A watched module has an attribute whose `__deepcopy__` is called when the module's copy is there
    already.
    """

    def __init__(self, watcher: str) -> None:
        self._name = f"_lightning_shard_copies_{watcher}"
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self._watched: list[nn.Module] = []

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Note the copies of these modules from now on."""
        for module in dict.fromkeys(modules):
            vars(module)[self._name] = _Tells(self, module)
            self._watched.append(module)

    def note(self, made: nn.Module, of: nn.Module) -> None:
        """Remember which module a module is a copy of."""
        self._copies[made] = self._copies.get(of, of)

    def take(self) -> Mapping[nn.Module, nn.Module]:
        """Return the copies of modules with their originals, and forget them here."""
        taken, self._copies = dict(self._copies.items()), WeakKeyDictionary()
        self._forget(taken)
        return taken

    def end(self) -> None:
        """Let the modules be copied without notice."""
        self._forget(self._watched)
        self._watched = []

    def _forget(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            vars(module).pop(self._name, None)


class _Tells:
    """An attribute of a module whose `__deepcopy__` notes the module's copy."""

    def __init__(self, copies: ModuleCopies, module: nn.Module) -> None:
        self._copies, self._module = copies, ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tells":
        module = self._module()
        made = memo.get(id(module))
        if module is None or not isinstance(made, nn.Module):
            return self
        self._copies.note(made, module)
        return _Tells(self._copies, made)

    def __reduce__(self) -> Any:
        return type(None), ()


class SharedByCopies:
    """An object that a copy of what has it shares: a copy of a layer is split as the layer is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@contextmanager
def instead(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Inside, `call` is called in a method's place, with the method before its arguments."""
    own = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(own, *args, **kwargs)

    with patch.object(owner, name, called):
        yield


def around(
    owner: Any, name: str, inside: Callable[[], AbstractContextManager[Any]]
) -> AbstractContextManager[None]:
    """Inside, each call of a method runs in a context of its own."""

    def call(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with inside():
            return own(*args, **kwargs)

    return instead(owner, name, call)


def extend_class(
    module: nn.Module, prefix: str, mixin: type, members: Mapping[str, Any] | None = None
) -> None:
    """Extend a module's class by a mixin before it, which `give_class_back` takes off again.

    Args:
        module: The module, whose hooks, names and `isinstance` go on working.
        prefix: What the class's name begins with.
        mixin: Comes before the module's own class.
        members: What the class has besides, the same objects for all modules that are alike.
    """
    own: Any = type(module)
    _become(module, _extended(prefix, mixin, own, tuple((members or {}).items())))


@cache
def _extended(
    prefix: str, mixin: type, own: type[nn.Module], members: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
    """Return a class that stands for the model's own: see `units.class_name`."""
    name = str(vars(own).get("stands_for", own.__name__))
    return type(f"{prefix}{own.__name__}", (mixin, own), dict(members) | {"stands_for": name})


def give_class_back(module: nn.Module, mixins: Iterable[type]) -> None:
    """Take the first of some mixins off a module's class.

    A class that user code has made of it since, as a parametrization does, stays, and so does one
    with another mixin.
    """
    firsts = {(mixin,) for mixin in mixins}
    seen = type(module)
    made = next(one for one in seen.__mro__ if one.__bases__[:1] in firsts)
    if seen.__bases__ == (made,):  # a parametrization's, which is this module's alone
        seen.__bases__ = made.__bases__[1:]
    else:
        _become(module, _without(seen, made))


def _become(module: nn.Module, kind: type) -> None:
    module.__class__ = kind


def _without(kind: type, made: type) -> type:
    """Return a class like `kind`, which has another base where it has `made`."""
    if kind is made:
        return made.__bases__[1]
    bases = tuple(_without(one, made) if issubclass(one, made) else one for one in kind.__bases__)
    return type(
        kind.__name__,
        bases,
        {name: one for name, one in vars(kind).items() if name not in _OF_EVERY_CLASS},
    )
