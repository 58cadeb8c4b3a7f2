"""One folder that is being written: what all ranks agree on, then what each rank's thread does.

begin, plan    on the ranks' own threads, which talk to each other; nothing is on the disk yet
write          this rank's file, and on rank 0 meta.pt: in the thread
link           the same where another folder has the same elements: one file with two names
complete       index, checksums and the folder's name: in rank 0's thread
"""

import io
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.async_save.staged_items import SaveCancelledError
from lightning_shard.checkpoint.async_save.staged_writer import StagedWriter, Staging
from lightning_shard.checkpoint.files.checksums import checksum_of, write_checksums
from lightning_shard.checkpoint.files.failures import not_saved
from lightning_shard.checkpoint.sharded.folder import META_FILE
from lightning_shard.checkpoint.sharded.index import INDEX_FILE, by_itself
from lightning_shard.checkpoint.sharded.writing import (
    BoxSavePlanner,
    agreed_folder,
    checksums_of_rank_0,
)
from lightning_shard.errors import CheckpointError


class UnfinishedFolder:
    """A folder that has no name yet; each rank must make one, with the same path.

    Args:
        path: Where the folder is to be.
        state: As for `write_folder`.
        meta: As for `write_folder`; it is pickled here.
        collectives: Group of all ranks; None where this process is alone.
        staging: Copies what this rank writes, or compares it with an earlier copy.

    Attributes:
        written: Where in its file this rank has put what, and checksums, once it has.

    Raises:
        CheckpointError: Some rank could not begin.
    """

    def __init__(
        self,
        path: Any,
        state: Mapping[str, Any],
        meta: Mapping[str, Any] | None,
        collectives: Collectives | None,
        staging: Staging,
    ) -> None:
        self.path = path
        self.written: Any = None
        self._collectives = collectives
        self._rank = 0 if collectives is None else collectives.rank
        with ExitStack() as stack:
            self._meta: memoryview | None = None
            prepare = partial(self._keep, meta)
            self._folder = agreed_folder(path, collectives, stack, prepare)
            self.writer = StagedWriter(self._folder, staging)
            self._plan(state)
            self._place = stack.pop_all()

    def _keep(self, meta: Mapping[str, Any] | None, _: Path) -> None:
        """Pickle what is meta.pt, as it is now."""
        file = io.BytesIO()
        torch.save(meta, file)
        self._meta = file.getbuffer()

    def _plan(self, state: Mapping[str, Any]) -> None:
        alone = self._collectives is None
        writer, planner = self.writer, BoxSavePlanner()
        try:
            with by_itself() if alone else nullcontext():
                save(dict(state), storage_writer=writer, planner=planner, no_dist=alone)
        except CheckpointException as error:
            told = {rank: repr(one) for rank, (one, _) in error.failures.items()}
            raise CheckpointError(explained(told)) from error

    def write(self) -> None:
        """Write this rank's files; runs in the thread."""
        with _Explaining(self.path):
            self._write_meta()
            results = self.writer.write_staged()
            meta = checksums_of_rank_0(self._folder, self._rank)
            self.written = results, self.writer.checksums | meta

    def link(self, other: "UnfinishedFolder") -> None:
        """Give this rank's file in `other`, which has the same elements, a second name here."""
        with _Explaining(self.path):
            self._write_meta()
            for path in other._folder.glob(f"__{self._rank}_*.distcp"):
                _link(path, self._folder / path.name)
            results, sums = other.written
            meta = {META_FILE: checksum_of(self._folder / META_FILE)} if META_FILE in sums else {}
            self.written = results, {**sums, **meta}

    def complete(self, written: Sequence[Any]) -> None:
        """Complete the folder from what all ranks have written, and give it its name."""
        with _Explaining(self.path):
            self.writer.write_index([results for results, _ in written])
            sums = {name: one for _, each in written for name, one in each.items()}
            sums[INDEX_FILE] = checksum_of(self._folder / INDEX_FILE)
            write_checksums(self._folder, sums)
            self._place.close()

    def discard(self) -> None:
        """Remove the folder, on rank 0."""
        with suppress(SaveCancelledError), self._place:
            raise SaveCancelledError

    def _write_meta(self) -> None:
        if self._meta is not None:
            (self._folder / META_FILE).write_bytes(self._meta)
            self._meta = None


class _Explaining:
    """Raises the operating system's reason where there is one: torch tells another story."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        found = error
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        if found is not None:
            raise not_saved(self._path, found) from error


def explained(failed: Mapping[int, str]) -> str:
    """Return what is told on every rank of the ranks that have failed, first those by themselves.

    Args:
        failed: By rank, why it has.
    """
    own = {rank: one for rank, one in failed.items() if SaveCancelledError.__name__ not in one}
    told = "; ".join(f"rank {rank}: {one}" for rank, one in (own or failed).items())
    return (
        f"A checkpoint that was being written while training went on was not saved ({told}). "
        f"Earlier checkpoints are as they were."
    )


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # not every filesystem has files with two names
        shutil.copyfile(path, name)
