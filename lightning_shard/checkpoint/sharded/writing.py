"""Writing the folder: each rank its own boxes, and rank 0 what Lightning keeps besides."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.files.checksums import (
    Checksum,
    checksum_of,
    read_checksums,
    verify_folder,
    write_checksums,
)
from lightning_shard.checkpoint.files.failures import not_saved
from lightning_shard.checkpoint.files.new import new_folder
from lightning_shard.checkpoint.sharded.box_writer import BoxWriter
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import META_FILE
from lightning_shard.checkpoint.sharded.index import INDEX_FILE, by_itself
from lightning_shard.errors import CheckpointError


class BoxSavePlanner(DefaultSavePlanner):
    """Finds boxes, which torch looks for in subclasses of tensors alone."""

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
    """Write a checkpoint, which takes its place when all of it is on the disk; each rank must call.

    Args:
        path: Where the folder is to be.
        state: What this rank has of everything in tensors: nested mappings of `BoxedTensor`, of
            tensors and other values. A box, or a value, that several ranks have is written by one.
        meta: The rest of Lightning's checkpoint, on rank 0; None on the others.
        collectives: Group of all ranks; None where this rank has everything and asks nobody.

    Raises:
        CheckpointError: Some rank could not write.
    """
    group = None if collectives is None or collectives.size == 1 else collectives
    rank = 0 if group is None else group.rank
    with ExitStack() as stack:
        place = agreed_folder(
            path, group, stack, lambda folder: torch.save(meta, folder / META_FILE)
        )
        own = _write(place, state, rank, alone=group is None) | checksums_of_rank_0(place, rank)
        written = [own] if group is None else group.all_gather_object(own)
        if rank == 0:
            write_checksums(place, {name: one for each in written for name, one in each.items()})


def agreed_folder(
    path: Any,
    collectives: Collectives | None,
    stack: ExitStack,
    prepare: Callable[[Path], object],
) -> Path:
    """Return the folder to write into, which rank 0 makes; each rank must call.

    Args:
        path: Where the folder is to be.
        collectives: Group of all ranks; None where this process is alone.
        stack: Puts the folder in its place at its end, on rank 0.
        prepare: What rank 0 does before any rank waits for another; it may fail.

    Raises:
        CheckpointError: The folder cannot be made, or prepared.
    """
    made: tuple[str | None, str] = None, ""
    if collectives is None or collectives.rank == 0:
        try:
            place = stack.enter_context(new_folder(path))
            prepare(Path(place))
            made = place, ""
        except CheckpointError as error:
            made = None, str(error)
        except OSError as error:
            made = None, str(not_saved(path, error))
        except Exception as error:  # of an object that is pickled, any
            made = None, _not_pickled(path, error)
    if collectives is not None:
        made = collectives.broadcast_object(made, src=0)
    folder, failure = made
    if folder is None:
        raise CheckpointError(failure)
    return Path(folder)


def _not_pickled(path: Any, error: Exception) -> str:
    return (
        f"{path} was not saved: {type(error).__name__}: {error}. What was there before is as it "
        f"was. Let the module and callbacks keep what can be pickled."
    )


def _write(
    folder: Path, state: Mapping[str, Any], rank: int, *, alone: bool
) -> dict[str, Checksum]:
    writer = BoxWriter(folder)
    try:
        with by_itself() if alone else nullcontext():
            save(dict(state), storage_writer=writer, planner=BoxSavePlanner(), no_dist=alone)
    except CheckpointException as error:
        told = "; ".join(f"rank {rank}: {one!r}" for rank, (one, _) in error.failures.items())
        raise CheckpointError(
            f"The checkpoint could not be written to {str(folder)!r} ({told}). Mend that, and save "
            f"again; earlier checkpoints are as they were."
        ) from error
    return writer.checksums


def checksums_of_rank_0(folder: Path, rank: int) -> dict[str, Checksum]:
    """Return the checksums of what rank 0 has written so far beside its boxes; its own to call."""
    written = [META_FILE, INDEX_FILE] if rank == 0 else []
    return {name: checksum_of(folder / name) for name in written if (folder / name).is_file()}


def verify_share(path: Path, rank: int, num_ranks: int) -> None:
    """Compare this rank's share of a folder's files with their checksums; all ranks' are all files.

    Raises:
        CheckpointError: A file is missing, or not as it was written.
    """
    names = sorted(read_checksums(path) or ())
    verify_folder(path, names[rank::num_ranks])
