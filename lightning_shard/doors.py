"""Registration with torch and each Lightning, when they are imported.

torch                                  c10d learns our backends' names
lightning.pytorch, pytorch_lightning   the registry learns the strategies' names, and a Trainer
                                       takes a strategy that was made for the other root;
                                       `load_from_checkpoint` takes folders, and "last" is found
                                       on object stores
lightning.fabric, lightning_fabric     its registry learns the names, too; MPI is asked only where
                                       it has started the ranks
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

from lightning_shard.after_import import after_import

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

_WITHOUT_TORCH = (
    *("after_import", "cli", "doctor", "doors", "errors", "exports", "on_pytorch_lightning"),
    *("reporting", "schemes", "settings", "sizes"),
)


def open_doors() -> None:
    """Register with the packages that are imported, and with the others once they are."""
    after_import("torch", _register_backends)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFirst())
    for lightning in LIGHTNING:
        after_import(lightning, partial(_serve, lightning))
    for lightning, package in FABRIC.items():
        after_import(lightning, partial(_serve_fabric, lightning, package))


class _TorchFirst(MetaPathFinder):
    """Imports torch before the first module of this package that uses it.

    When torch's import ends, the backends are imported: no module of this package may be half
    imported then.
    """

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == __package__ and name.partition(".")[0] not in _WITHOUT_TORCH:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            import_module("torch")
        return None


def _register_backends() -> None:
    import_module("lightning_shard.backends.registry")


def _serve(lightning: str) -> None:
    """Make every strategy known to this root of Lightning."""
    import_module("lightning_shard.strategies.registry").register_strategies(
        lightning, LIGHTNING[lightning]
    )
    import_module("lightning_shard.load_from_checkpoint").take_folders(lightning)
    import_module("lightning_shard.resume_from_remote").take_remote_places(lightning)
    counterparts = import_module("lightning_shard.on_pytorch_lightning.counterparts")
    counterparts.take_counterparts(lightning, LIGHTNING)


def _serve_fabric(lightning: str, package: str) -> None:
    """Make every strategy known to this root of Fabric."""
    import_module("lightning_shard.fabric.registry").register_strategies(lightning, package)
    import_module("lightning_shard.fabric.misplaced").refuse_misplaced(lightning, package)
    environments = package.removesuffix("fabric") + "environments"  # of the same root
    import_module(f"{environments}.detection").ask_mpi_under_mpi_alone(lightning)
