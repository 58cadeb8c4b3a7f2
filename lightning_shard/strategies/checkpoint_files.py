"""The default `CheckpointIO` of this package's strategies: files that are never half there.

A file takes its place when all of it is on the disk, and is compared with its checksums before
anything of it is loaded. It is an ordinary file of `torch.save`.
"""

import os
from collections.abc import Iterable
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.files.new import new_file
from lightning_shard.checkpoint.files.parts import remove
from lightning_shard.checkpoint.files.places import is_on_the_web, local_path
from lightning_shard.checkpoint.files.reading import read_file
from lightning_shard.checkpoint.files.remote_folders import remove_remote
from lightning_shard.checkpoint.files.torch_archive import ArchiveRecord, records_of, write_archive
from lightning_shard.checkpoint.mapped_file import load_mapped, load_together
from lightning_shard.errors import CheckpointError

(_Wrapping,) = AsyncCheckpointIO.__bases__  # what wraps another `CheckpointIO`


class CheckpointFiles(CheckpointIO):
    """Saves and loads checkpoint files, on local and remote filesystems."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self.save_records(records_of(checkpoint), path, storage_options)

    def save_records(
        self, records: Iterable[ArchiveRecord], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint whose records may come one after the other."""
        if storage_options is not None:
            raise TypeError(
                f"trainer.save_checkpoint(storage_options=...) got {storage_options!r}, but "
                f"{type(self).__name__} takes none. Pass Trainer(plugins=[...]) a CheckpointIO of "
                f"your own that does, or configure fsspec."
            )
        with new_file(path) as file:
            write_archive(file, records)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint file.

        Raises:
            CheckpointError: The file is missing, damaged or no checkpoint.
        """
        if is_on_the_web(path):
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        return _dictionary(path, read_file(path, map_location, weights_only))

    def load_mapped(
        self,
        path: Any,
        weights_only: bool | None,
        module: nn.Module,
        collectives: Collectives | None,
        rank: int,
    ) -> dict[str, Any]:
        """Load a checkpoint file for a run, mapped into memory; see `mapped_file.load_mapped`."""
        if is_on_the_web(path):
            return self.load_checkpoint(path, weights_only=weights_only)
        return _dictionary(path, load_mapped(path, weights_only, module, collectives, rank))

    def load_together(
        self, path: Any, weights_only: bool | None, collectives: Collectives | None
    ) -> dict[str, Any]:
        """Load a file whose tensors are mapped into memory; see `mapped_file.load_together`."""
        if is_on_the_web(path):
            return self.load_checkpoint(path, weights_only=weights_only)
        return _dictionary(path, load_together(path, weights_only, collectives))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        place = local_path(path)
        if place is None:
            remove_remote(path)
        else:
            remove(place)


def _dictionary(path: Any, loaded: Any) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{os.fspath(path)} holds a {type(loaded).__name__}, expected a checkpoint, which "
            f"is a dictionary. Load it with torch.load."
        )
    return loaded


def with_files(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """Return what writes and reads a strategy's checkpoints: the user's, or ours.

    A plugin that wraps another, and was given none, gets ours.
    """
    if checkpoint_io is None:
        return CheckpointFiles()
    if isinstance(checkpoint_io, _Wrapping):
        wrapper: Any = checkpoint_io
        wrapper.checkpoint_io = CheckpointFiles()  # kept only where there was none
    return checkpoint_io
