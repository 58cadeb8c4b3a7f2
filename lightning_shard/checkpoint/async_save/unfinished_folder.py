"""One folder that is being written: what all ranks agree on, then what each rank's thread does.

begin, plan,   on the ranks' own threads, which talk to each other once (and to plan anew); nothing
copy           is on the disk yet
write          this rank's file, and on rank 0 meta.pt: in the thread
link           the same where another folder has the same elements: one file with two names
complete       index, checksums and the folder's name: in rank 0's thread
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.async_save.save_plans import SavePlans
from lightning_shard.checkpoint.async_save.staged_items import SaveCancelledError, StagedItems
from lightning_shard.checkpoint.files.checksums import Checksum, complete_folder, write_checked
from lightning_shard.checkpoint.files.new import not_saved
from lightning_shard.checkpoint.files.open_folder import META_FILE, OpenFolder
from lightning_shard.checkpoint.sharded.box_writer import BoxWriter, renamed
from lightning_shard.checkpoint.sharded.writing import BoxSavePlanner, made_folder
from lightning_shard.errors import CheckpointError

Staging: TypeAlias = Callable[[SavePlan, SavePlanner], StagedItems | None]
"""Copies what a rank writes by a plan; None where an earlier copy does not hold the same."""


class StagedWriter(BoxWriter):
    """Copies what this rank writes by a plan, and writes it when asked.

    Args:
        folder: The folder to write into.
        rank: Number of this rank.
    """

    def __init__(self, folder: OpenFolder, rank: int) -> None:
        super().__init__(folder)
        self.set_up_storage_writer(rank == 0, rank=rank)
        self.staged: StagedItems | None = None
        self._plan: SavePlan | None = None

    def copy(self, plan: SavePlan, planner: SavePlanner, staging: Staging) -> bool:
        """Copy what this rank writes; return False where an earlier copy does not hold the same."""
        self._plan, self.staged = plan, staging(plan, planner)
        return self.staged is not None

    def write_staged(self) -> list[WriteResult]:
        """Write this rank's file, and return where in it everything is."""
        assert self._plan is not None
        staged: Any = self.staged  # of a planner it has the one method that is asked for
        results: list[WriteResult] = self.write_data(self._plan, staged).value()
        return results


class UnfinishedFolder:
    """A folder that has no name yet; each rank must make one, with the same path.

    Args:
        path: Where the folder is to be.
        state: As for `write_folder`.
        meta: As for `write_folder`; it is pickled here.
        collectives: Group of all ranks; None where this process is alone.
        plans: The plans of the save before, which are made anew where they do not stand.
        staging: Copies what this rank writes, or compares it with an earlier copy.

    Attributes:
        has_copy: Whether this rank has a copy, see `staging`.
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
        plans: SavePlans,
        staging: Staging,
    ) -> None:
        self.path = path
        self.written: Any = None
        self._rank = 0 if collectives is None else collectives.rank
        with ExitStack() as stack:
            self._meta: memoryview | None = None
            made: tuple[OpenFolder | None, str] = None, ""
            if self._rank == 0:
                made = made_folder(path, stack, partial(self._keep, meta))
            self._begin(made, state, collectives, plans)
            self._metadata = plans.metadata if self._rank == 0 else None
            self.has_copy = self.writer.copy(plans.final, self._planner, staging)
            self._place = stack.pop_all()

    def _begin(
        self,
        made: tuple[OpenFolder | None, str],
        state: Mapping[str, Any],
        collectives: Collectives | None,
        plans: SavePlans,
    ) -> None:
        """Agree on the folder that rank 0 has made, and on what each rank writes."""
        local, failure = self._local_plan(state)
        known = set[int]() if local is None else plans.numbers_of(local, collectives)
        told = [(made, known, failure)]
        if collectives is not None:
            told = collectives.all_gather_object(told[0])
        (folder, reason), _, _ = told[0]
        if folder is None:
            raise CheckpointError(reason)
        failed = {rank: one for rank, (_, _, one) in enumerate(told) if one}
        if failed or local is None:
            raise CheckpointError(explained(failed))
        self._folder = folder
        self.writer = StagedWriter(self._folder, self._rank)
        if standing := known.intersection(*(numbers for _, numbers, _ in told)):
            plans.choose(max(standing))
        else:
            plans.make(local, self._planner, self.writer, collectives)

    def _local_plan(self, state: Mapping[str, Any]) -> tuple[SavePlan | None, str]:
        """Return what there is to write on this rank, or None and why nobody can tell."""
        self._planner = BoxSavePlanner()
        try:
            self._planner.set_up_planner(dict(state), is_coordinator=self._rank == 0)
            return self._planner.create_local_plan(), ""
        except Exception as error:  # torch's, of what it cannot save
            return None, repr(error)

    def _keep(self, meta: Mapping[str, Any] | None, _: OpenFolder) -> None:
        """Pickle what is meta.pt, as it is now."""
        file = io.BytesIO()
        torch.save(meta, file)
        self._meta = file.getbuffer()

    def write(self) -> None:
        """Write this rank's files; runs in the thread."""
        with _Explaining(self.path):
            meta = self._write_meta()
            results = self.writer.write_staged()
            self.written = results, self.writer.checksums | meta

    def link(self, other: "UnfinishedFolder") -> None:
        """Give this rank's files in `other`, which has the same elements, second names here."""
        with _Explaining(self.path):
            meta = self._write_meta()
            names = self._folder.take_over(other._folder, list(other.writer.checksums))
            results, sums = other.written
            found = {names[name]: one for name, one in sums.items() if name in names}
            self.written = renamed(results, names), {**found, **meta}

    def complete(self, written: Sequence[Any]) -> None:
        """Complete the folder from what all ranks have written, and give it its name."""
        with _Explaining(self.path):
            assert self._metadata is not None
            self.writer.finish(self._metadata, [results for results, _ in written])
            index = self.writer.index
            sums = {name: one for _, each in written for name, one in each.items()}
            complete_folder(self._folder, index, sums)
            self._place.close()

    def discard(self) -> None:
        """Remove the folder, on rank 0."""
        with suppress(SaveCancelledError), self._place:
            raise SaveCancelledError

    def _write_meta(self) -> dict[str, Checksum]:
        if self._meta is None:
            return {}
        content, self._meta = self._meta, None
        name = self._folder.named(META_FILE)
        return {name: write_checked(self._folder, name, content)}


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
