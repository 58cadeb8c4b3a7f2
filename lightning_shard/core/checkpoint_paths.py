"""What Lightning's own functions take for a checkpoint: folders too, and what is on object stores.

Lightning 2.6 leaves the protocol out of what `fit(ckpt_path="last")`, and a job that SLURM starts
again, find behind fsspec, and takes a folder that was never completed for a checkpoint. There these
two look-ups go another way; for local folders nothing changes. `load_from_checkpoint` takes a
folder of the sharded format: each root of Lightning reads with one function, `core.saving.pl_load`.

Private names of Lightning stand here; `tests/core/test_checkpoint_paths.py` and
`tests/core/test_load_from_checkpoint.py` fail when they change.
"""

import os
import re
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from typing import Any

_REQUEUED = re.compile(r"hpc_ckpt_(?P<number>\d+)\.ckpt")


def take_remote_places(lightning: str) -> None:
    """Let fits of a root of Lightning resume from what they find behind fsspec."""
    connectors = import_module(f"{lightning}.trainer.connectors.checkpoint_connector")
    connector = getattr(connectors, "_CheckpointConnector", None)
    parse = getattr(connector, "_parse_ckpt_path", None)
    requeued = getattr(connector, "_hpc_resume_path", None)
    if connector is None or parse is None or not isinstance(requeued, property):
        return  # a release that we do not serve is imported as if we were not there

    @wraps(parse)
    def parse_ckpt_path(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        found = _newest_last(self.trainer) if ckpt_path == "last" else None
        return found or parse(self, state_fn, ckpt_path, *args, **kwargs)

    def hpc_resume_path(self: Any) -> Any:
        folder = self.trainer.default_root_dir
        return _newest_requeued(folder) if _is_remote(folder) else requeued.__get__(self)

    connector._parse_ckpt_path = parse_ckpt_path
    connector._hpc_resume_path = property(hpc_resume_path)


def _newest_last(trainer: Any) -> str | None:
    """Return the newest of a run's last checkpoints, if some of them are remote."""
    paths = list(_lasts(trainer))
    if not any(map(_is_remote, paths)):
        return None
    found: list[str] = _found().by_age(paths)
    return found[-1] if found else None


def _lasts(trainer: Any) -> Iterator[str]:
    for callback in trainer.callbacks:
        if hasattr(callback, "CHECKPOINT_NAME_LAST"):
            folder = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)
            last = callback.CHECKPOINT_NAME_LAST
            yield from _found().checkpoints_in(folder, callback.FILE_EXTENSION, last)
        elif type(callback).__name__ == "OnExceptionCheckpoint":
            yield callback.ckpt_path


def _newest_requeued(folder: str) -> str | None:
    """Return the checkpoint of the highest number among those that are complete."""
    numbers = {
        int(name["number"]): path
        for path in _found().checkpoints_in(folder, ".ckpt")
        if (name := _REQUEUED.fullmatch(path.rpartition("/")[2]))
    }
    for _, path in sorted(numbers.items(), reverse=True):
        if _found().completed_at(path) is not None:
            return str(path)
    return None


def _is_remote(path: Any) -> bool:
    text = str(os.fspath(path))
    return ("://" in text or "::" in text) and bool(_found().is_remote(text))


def _found() -> Any:
    return import_module("lightning_shard.checkpoint.files.parts")


def take_folders(lightning: str) -> None:
    """Let modules and data modules of a root of Lightning load from folders."""
    saving = import_module(f"{lightning}.core.saving")
    read_file = getattr(saving, "pl_load", None)
    if read_file is None:
        return  # a release that we do not serve is imported as if we were not there

    @wraps(read_file)
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if _is_folder(path):
            whole = import_module("lightning_shard.checkpoint.conversion.source")
            return whole.whole_checkpoint(path, map_location, weights_only)
        return read_file(path, map_location=map_location, weights_only=weights_only)

    vars(saving)["pl_load"] = read


def _is_folder(path: Any) -> bool:
    if not isinstance(path, (str, os.PathLike)):
        return False
    return bool(import_module("lightning_shard.checkpoint.files.places").is_folder(path))
