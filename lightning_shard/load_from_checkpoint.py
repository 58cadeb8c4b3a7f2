"""`Model.load_from_checkpoint(path)` takes a folder of the sharded format, as it takes a file.

Each root of Lightning reads a file with one function, `core.saving.pl_load`; it reads folders, too,
once this package is imported. `tests/test_load_from_checkpoint.py` fails when it changes.
"""

import os
from functools import wraps
from importlib import import_module
from typing import Any


def take_folders(lightning: str) -> None:
    """Let modules and data modules of a root of Lightning load from folders.

    Args:
        lightning: Root of Lightning: "lightning.pytorch" or "pytorch_lightning".
    """
    saving = import_module(f"{lightning}.core.saving")
    read_file = getattr(saving, "pl_load", None)
    if read_file is None:
        return  # a release that we do not serve is imported as if we were not there

    @wraps(read_file)
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if _is_folder(path):
            whole = import_module("lightning_shard.checkpoint.conversion.whole")
            return whole.whole_checkpoint(path, map_location, weights_only)
        return read_file(path, map_location=map_location, weights_only=weights_only)

    vars(saving)["pl_load"] = read


def _is_folder(path: Any) -> bool:
    if not isinstance(path, (str, os.PathLike)):
        return False
    return bool(import_module("lightning_shard.checkpoint.files.places").is_folder(path))
