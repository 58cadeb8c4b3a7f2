"""This package's strategies for a Trainer of `pytorch_lightning`.

A `pytorch_lightning.Trainer` takes the names (`strategy="zero3"`) and the strategies of
`lightning_shard` as they are. A strategy of your own derives from the class of the same name here:
`from lightning_shard.on_pytorch_lightning import ZeRO3Strategy`. The callbacks of
`lightning_shard.profiling` are in `lightning_shard.on_pytorch_lightning.profiling`. The first
import of either imports `pytorch_lightning`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_shard.core.schemes import HOMES
from lightning_shard.on_pytorch_lightning import mirror

mirror.install()


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(mirror.mirrored(HOMES[name])), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(HOMES)
