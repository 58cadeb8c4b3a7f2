"""A mirror of the modules that build on `lightning.pytorch`, built on `pytorch_lightning`.

Both packages are the same source under two roots, but their classes are different ones, and a
Trainer takes those of its own root only. So each module here that builds on Lightning exists twice:

    lightning_shard.strategies.run                        lightning.pytorch, lightning.fabric
    lightning_shard.on_pytorch_lightning.strategies.run   pytorch_lightning, lightning_fabric

The second is compiled from the same file when it is imported, with other names in its import
statements. Modules that do not build on Lightning (engine, backends, errors) exist once.
"""

import ast
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from typing_extensions import override

PACKAGE = "lightning_shard"
MIRROR = f"{PACKAGE}.on_pytorch_lightning"

BUILT_ON_LIGHTNING = (
    "elastic",
    "environments",
    "fabric",
    "precision.plugins",
    "planning",
    "profiling",
    "ray",
    "replay",
    "strategies",
    "tools.doctor.measuring",
    "tools.proving",
)
"""The mirrored modules and packages: those that import Lightning, or one of these."""

_ROOTS = (  # the longest first
    ("lightning.pytorch", "pytorch_lightning"),
    ("lightning.fabric", "lightning_fabric"),
    *((f"{PACKAGE}.{name}", f"{MIRROR}.{name}") for name in BUILT_ON_LIGHTNING),
)


def mirrored(name: str) -> str:
    """Return the dotted name that a module has in the mirror; other names stay."""
    for root, other in _ROOTS:
        if name == root or name.startswith(f"{root}."):
            return other + name.removeprefix(root)
    return name


def original(name: str) -> str:
    """Return the original's name of a module of the mirror."""
    return name.replace(f"{MIRROR}.", f"{PACKAGE}.", 1)


def install() -> None:
    """Make the mirror's modules importable."""
    if not any(isinstance(finder, _MirrorFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MirrorFinder())


class _MirrorFinder(MetaPathFinder):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = original(fullname)
        is_above = any(f"{PACKAGE}.{name}".startswith(f"{source}.") for name in BUILT_ON_LIGHTNING)
        if source == fullname or not (is_above or mirrored(source) == fullname):
            return None
        found = _find(source)
        if found is None or found.origin is None:
            return None
        loader = _MirrorLoader(found.origin)
        is_package = found.submodule_search_locations is not None
        spec = spec_from_loader(fullname, loader, origin=found.origin, is_package=is_package)
        if spec is not None:
            spec.has_location = True  # tracebacks and `inspect` show the file
        return spec


def _find(name: str) -> ModuleSpec | None:
    """Find a module's file, without importing the packages that it is in."""
    folder = Path(__file__).parents[1].joinpath(*name.split(".")[1:-1])
    return PathFinder.find_spec(name, [str(folder)])


class _MirrorLoader(InspectLoader):
    """Compiles a file with its imports mirrored."""

    def __init__(self, origin: str) -> None:
        self._origin = origin

    @override
    def get_source(self, fullname: str) -> str:
        return Path(self._origin).read_text(encoding="utf-8")

    @override
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_source(fullname), self._origin)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    alias.name = mirrored(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                node.module = mirrored(node.module)
        return compile(tree, self._origin, "exec", dont_inherit=True)
