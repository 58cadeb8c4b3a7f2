"""The default `CheckpointIO` of this package's strategies: files that are never half there.

An ordinary file of `torch.save` takes its place when all of it is on the disk, and is compared with
its checksums before anything of it is loaded. In a run it is mapped into memory, and checked by the
ranks that see it together: a rank copies the shards that it needs of weights and optimizers'
states, so that none holds a copy of the file, and everything else, since whoever is given it may
keep it. Whoever looks at the whole checkpoint (a hook) gets ordinary tensors instead.
"""

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.by_rank import entries_of_ranks
from lightning_shard.checkpoint.files.new import new_file, remove_remote
from lightning_shard.checkpoint.files.parts import home, remove
from lightning_shard.checkpoint.files.places import is_on_the_web, local_path
from lightning_shard.checkpoint.files.reading import ALL, Share, read_file, read_mapped
from lightning_shard.checkpoint.files.torch_archive import ArchiveRecord, records_of, write_archive
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.streamed import StreamedFile
from lightning_shard.errors import CheckpointError, ConfigError

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

    def save_streamed(
        self,
        checkpoint: dict[str, Any],
        file: StreamedFile,
        path: Any,
        options: Any,
        *,
        writes: bool,
    ) -> None:
        """Save what comes from all ranks, on the rank that `writes`; each rank must call."""
        try:
            if writes:
                self.save_records(file.records(checkpoint), path, options)
        finally:
            file.finish()

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint file."""
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
        """Load a checkpoint of which a rank reads what it needs when it does; each must call."""
        loaded = self.load_together(path, weights_only, collectives)
        if not is_on_the_web(path):
            _copy_what_may_stay(loaded, module, f"rank_{rank}")
        return loaded

    def load_together(
        self, path: Any, weights_only: bool | None, collectives: Collectives | None
    ) -> dict[str, Any]:
        """Load as `load_mapped` does, with tensors that are mapped: who keeps one copies it."""
        if is_on_the_web(path):
            return self.load_checkpoint(path, weights_only=weights_only)
        share = _share_of(path, collectives)
        return _dictionary(path, read_mapped(path, weights_only, share=share))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        place = local_path(path)
        if place is None:
            remove_remote(path)
        else:
            remove(place)


def check_folder_writer(checkpoint_io: CheckpointIO, options: Any, keys: Collection[str]) -> None:
    """Refuse what a folder would pass over: a user's `CheckpointIO`, its options, or a filter."""
    if options is not None or keys or not isinstance(checkpoint_io, CheckpointFiles):
        raise ConfigError(
            f"checkpoint_format='sharded' lets each rank write its part of a folder, without a "
            f"CheckpointIO, got {type(checkpoint_io).__name__} and storage_options={options!r}, "
            f"and without a filter, got one of {sorted(keys) or 'nothing'}. Leave them out, or use "
            f"checkpoint_format='full'."
        )


def _dictionary(path: Any, loaded: Any) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{os.fspath(path)} holds a {type(loaded).__name__}, expected a checkpoint, which "
            f"is a dictionary. Load it with torch.load."
        )
    return loaded


def with_files(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """Return what writes and reads a strategy's checkpoints: the user's plugin, or ours."""
    if checkpoint_io is None:
        return CheckpointFiles()
    if isinstance(checkpoint_io, _Wrapping):
        wrapper: Any = checkpoint_io
        wrapper.checkpoint_io = CheckpointFiles()  # kept only where there was none
    return checkpoint_io


def _share_of(path: Any, collectives: Collectives | None) -> Share:
    """Return what is checked here of a file that other ranks may see, too."""
    if collectives is None or collectives.size == 1:
        return ALL
    seen = collectives.all_gather_object(_identity(path))
    mine = seen[collectives.rank]
    if mine is None:
        return ALL
    ranks = [rank for rank, one in enumerate(seen) if one == mine]
    return Share(ranks.index(collectives.rank), len(ranks))


def _identity(path: Any) -> tuple[Any, ...] | None:
    """Return what is equal where two ranks see the same file of the same host."""
    place = local_path(path)
    if place is None:
        return None
    try:
        found = os.stat(place)
    except OSError:
        return None
    return home(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _copy_what_may_stay(checkpoint: dict[str, Any], module: nn.Module, own: str) -> None:
    state = module.state_dict(keep_vars=True)
    params = [name for name, value in state.items() if isinstance(value, nn.Parameter)]
    section = checkpoint.get(CHECKPOINT_KEY)
    others = [name for name, _ in entries_of_ranks(section or {}) if name != own]
    _copy_all_but(checkpoint, ("state_dict", "optimizer_states", CHECKPOINT_KEY))
    _copy_all_but(checkpoint.get("state_dict"), params)
    _copy_all_but(section, others)


def _copy_all_but(entries: Any, mapped: Collection[str]) -> None:
    """Replace tensors by copies, in place: torch's own mapping knows module versions."""
    if not isinstance(entries, Mapping):
        return
    left: Any = entries
    for name in set(entries) - set(mapped):
        left[name] = in_own_memory(entries[name])


def in_own_memory(nested: Any) -> Any:
    """Return nested containers with copies of the tensors in them, which are mapped."""
    return tree_map_only(Tensor, _copy, nested)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone() if type(tensor) is Tensor else copy.deepcopy(tensor)
