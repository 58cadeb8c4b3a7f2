"""Calls a function once some code has imported a package, without importing the package itself.

    import lightning_shard          import pytorch_lightning
      └─ after_import(name, then)     ├─ its own loader runs it
                                      └─ then()

An import of any other name costs one look into a dictionary.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

Then = Callable[[], None]


def after_import(name: str, then: Then) -> None:
    """Call `then()` once the module is imported: at once if it is, else at the end of its import.

    Args:
        name: Dotted name of the module.
        then: Function that runs in the importing thread; the import raises its errors.
    """
    if name in sys.modules:
        then()
        return
    _finder.waiting[name] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Finds the awaited modules as the other finders do, with a loader that calls `then`."""

    def __init__(self) -> None:
        self.waiting: dict[str, Then] = {}

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _TellingLoader(spec.loader, fullname, self.waiting)
                return spec
        return None


class _TellingLoader(Loader):
    """Wraps a module's loader for one import, and calls the waiting function at its end."""

    def __init__(self, loader: Loader, name: str, waiting: dict[str, Then]) -> None:
        self._loader = loader
        self._name = name
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if (then := self._waiting.pop(self._name, None)) is not None:
            then()


_finder = _Finder()
