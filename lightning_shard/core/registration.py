"""Registration with torch and each Lightning, when they are imported.

torch                                  c10d learns our backends' names
lightning.pytorch, pytorch_lightning   the registry learns the strategies' names, and a Trainer
                                       takes a strategy that was made for the other root;
                                       `load_from_checkpoint` takes folders, and "last" is found
                                       on object stores
lightning.fabric, lightning_fabric     its registry learns the names, too; MPI is asked only where
                                       it has started the ranks

`after_import` calls a function once some code has imported a package, which it does not itself. An
import of any other name costs one look into a dictionary.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from lightning_shard.core import settings

Then = Callable[[], object]
LIGHTNING = {
    "lightning.pytorch": "lightning_shard",
    "pytorch_lightning": "lightning_shard.on_pytorch_lightning",
}
"""By Lightning's root, the package whose strategies are built on it."""
FABRIC = {
    "lightning.fabric": "lightning_shard.fabric",
    "lightning_fabric": "lightning_shard.on_pytorch_lightning.fabric",
}
"""By Fabric's root, the package whose strategies are built on it."""
_WITHOUT_TORCH = {
    *("cli", "core", "doctor", "errors", "extras", "on_pytorch_lightning", "registration"),
    *("options", "reporting", "schemes", "settings", "tools"),
}


def after_import(name: str, then: Then) -> None:
    """Call `then()` once the module is imported: now if it is, else at the end of its import."""
    if name in sys.modules:
        then()
        return
    _finder.waiting[name] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _AwaitedFinder(MetaPathFinder):
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


_finder = _AwaitedFinder()


def register_on_import() -> None:
    """Register with the packages that are imported, and with the others once they are."""
    after_import("torch", partial(import_module, "lightning_shard.backends.registry"))
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFirst())
    for lightning in LIGHTNING:
        after_import(lightning, partial(_serve, lightning))
    for lightning, package in FABRIC.items():
        after_import(lightning, partial(_serve_fabric, lightning, package))


class _TorchFirst(MetaPathFinder):
    """Imports torch before the first module of this package that uses it."""

    # When torch's import ends, the backends are imported: no module of this package may be half
    # imported then.

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        within = name.removeprefix("core.").removeprefix("tools.").partition(".")[0]
        if package == "lightning_shard" and within not in _WITHOUT_TORCH:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            import_module("torch")
        return None


def _serve(lightning: str) -> None:
    """Make every strategy known to this root of Lightning."""
    schemes = import_module("lightning_shard.core.schemes")
    schemes.register_strategies(lightning, LIGHTNING[lightning])
    paths = import_module("lightning_shard.core.checkpoint_paths")
    paths.take_folders(lightning)
    paths.take_remote_places(lightning)
    counterparts = import_module("lightning_shard.on_pytorch_lightning.counterparts")
    counterparts.take_counterparts(lightning, LIGHTNING)


def _serve_fabric(lightning: str, package: str) -> None:
    """Make every strategy known to this root of Fabric."""
    registry = import_module("lightning_shard.fabric.registry")
    registry.register_strategies(lightning, package)
    registry.refuse_misplaced(lightning, package)
    _ask_mpi_under_mpi_alone(lightning)


def _ask_mpi_under_mpi_alone(fabric: str) -> None:
    """Have this root of Fabric look at the variables of MPI's launchers before it asks MPI."""
    # To ask starts MPI, and Open MPI then listens on all addresses of the host.
    environment: Any = sys.modules[f"{fabric}.plugins.environments.mpi"].MPIEnvironment
    asks = environment.detect

    def detect() -> bool:
        """Whether MPI has started several ranks."""
        return settings.is_under_mpi() and asks()

    environment.detect = staticmethod(detect)
