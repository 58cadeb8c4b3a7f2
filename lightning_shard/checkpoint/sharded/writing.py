"""Writing the folder: each rank its own boxes, and rank 0 what Lightning keeps besides."""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.files.new import new_folder, not_saved
from lightning_shard.checkpoint.files.open_folder import (
    META_FILE,
    Checksum,
    OpenFolder,
    complete_folder,
    read_checksums,
    verify_folder,
)
from lightning_shard.checkpoint.files.torch_archive import records_of, write_archive
from lightning_shard.checkpoint.sharded.box_writer import BoxWriter
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import StoredFolder, by_itself, text_of, with_keys
from lightning_shard.errors import CheckpointError

_OF_RANK = re.compile(r"__(\d+)_")


class BoxSavePlanner(DefaultSavePlanner):
    """Finds boxes, which torch looks for in subclasses of tensors alone, and keeps keys."""

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(with_keys(state_dict, text_of), storage_meta, is_coordinator)

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, BoxedTensor):
            return value.__get_tensor_shard__(index)
        return super().lookup_object(index)


def write_folder(
    path: Any,
    state: Mapping[str, Any],
    meta: Mapping[str, Any] | None,
    collectives: Collectives | None,
) -> None:
    """Write a checkpoint, which takes its place once it is whole on disk; collective."""
    group = None if collectives is None or collectives.size == 1 else collectives
    rank = 0 if group is None else group.rank
    with ExitStack() as stack:
        sums: dict[str, Checksum] = {}  # of what rank 0 writes beside its boxes
        made: tuple[OpenFolder | None, str] = None, ""
        if rank == 0:
            made = made_folder(path, stack, lambda place: sums.update(write_meta(place, meta)))
        if group is not None:
            made = group.broadcast_object(made, src=0)
        place, failure = made
        if place is None:
            raise CheckpointError(failure)
        writer = _write(place, state, alone=group is None)
        own = writer.checksums | sums
        written = [own] if group is None else group.all_gather_object(own)
        if rank == 0:
            files = {name: one for each in written for name, one in each.items()}
            complete_folder(place, writer.index, files)


def write_meta(place: OpenFolder, meta: Any) -> dict[str, Checksum]:
    """Pickle what Lightning keeps besides into its file, and return the checksum by its name."""
    name = place.named(META_FILE)
    with closing(place.create(name)) as file:
        archive = write_archive(cast("BinaryIO", file), records_of(meta))
        file.finish()
        return {name: {"bytes": file.tell(), "crc32": f"{archive.crc:08x}"}}


def made_folder(
    path: Any, stack: ExitStack, prepare: Callable[[OpenFolder], object]
) -> tuple[OpenFolder | None, str]:
    """Make the folder to write into, on rank 0; return None and why where it cannot be."""
    try:
        place = stack.enter_context(new_folder(path))
        prepare(place)
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, str(not_saved(path, error))
    except Exception as error:  # of an object that is pickled, any
        return None, _not_pickled(path, error)
    return place, ""


def _not_pickled(path: Any, error: Exception) -> str:
    return (
        f"{path} was not saved: {type(error).__name__}: {error}. What was there before is as it "
        f"was. Let the module and callbacks keep what can be pickled."
    )


def _write(folder: OpenFolder, state: Mapping[str, Any], *, alone: bool) -> BoxWriter:
    writer = BoxWriter(folder)
    try:
        with by_itself() if alone else nullcontext():
            save(dict(state), storage_writer=writer, planner=BoxSavePlanner(), no_dist=alone)
    except CheckpointException as error:
        told = "; ".join(f"rank {rank}: {one!r}" for rank, (one, _) in error.failures.items())
        raise CheckpointError(
            f"The checkpoint could not be written to {folder.path!r} ({told}). Mend that, and save "
            f"again; earlier checkpoints are as they were."
        ) from error
    return writer


def verify_share(folder: StoredFolder, rank: int, num_ranks: int) -> None:
    """Compare this rank's share of a folder's files with their checksums; all ranks' are all files.

    A rank takes the files that the same rank has written, which it reads next where the layout is
    the same: its host has them in memory then.
    """
    folder.check_complete()
    names = sorted(read_checksums(folder.path, folder.edition) or ())
    own = [name for name in names if _writer_of(name) % num_ranks == rank]
    verify_folder(folder.path, own, edition=folder.edition)


def _writer_of(name: str) -> int:
    found = _OF_RANK.match(name)
    return 0 if found is None else int(found[1])


def verify_whole(path: Any) -> bool:
    """Compare all files of a folder with their checksums; return whether it has any."""
    folder = StoredFolder(path)
    verify_share(folder, 0, 1)
    return read_checksums(path, folder.edition) is not None
