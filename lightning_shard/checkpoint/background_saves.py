"""Saves that go on while a fit trains, and where in a run they come to their end.

    trainer.save_checkpoint     waits for the save before; copies; a thread writes, once all ranks
                                have copied. A second one of the same step gets the same files under
                                other names
    the beginning of a step     ranks ask each other how far their threads are, while a save is in
                                flight: a failure is raised on every rank here
    remove_checkpoint           what is to be removed stays until the save in flight is complete
    the end of a fit            waits, with a progress bar
    an exception of all ranks   waits, before callbacks save what there is
    another exception           gives the save up: the checkpoint before stays

One save goes through phases, from one to the next on all ranks at the boundary of a step:

    writing    each rank's thread writes its file, and sums it up
    placing    rank 0's thread writes index and checksums, and gives the folder its name
    complete

A thread that fails takes all of them along, and the folder is removed.

torch's `async_save` is not used: its thread (or process) talks to other ranks while training does,
which needs a second group and mixes up collectives where ranks are threads; its stagers copy all
that a rank has, before it is known which rank writes what; and its failures are in a future that
each rank sees at another step.
"""

import io
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Event
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.files.new import not_saved
from lightning_shard.checkpoint.files.open_folder import (
    META_FILE,
    Checksum,
    OpenFolder,
    complete_folder,
    on_one_filesystem,
    write_checked,
)
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.sharded.box_writer import BoxWriter, renamed
from lightning_shard.checkpoint.sharded.writing import BoxSavePlanner, made_folder, write_folder
from lightning_shard.errors import CheckpointError

_MOST_KEPT = 3  # within an epoch, at its end, and one that somebody else has made necessary


class _Plan(NamedTuple):
    """What one rank keeps of a plan that all have made."""

    number: int
    local: SavePlan
    final: SavePlan
    metadata: Metadata | None


class SavePlans:
    """The plans of one rank's last saves, the latest of which is last.

    The local plans of most saves are those of an earlier one, and then so is the global one, which
    all ranks make together. A first optimizer step, parameters that are frozen or unfrozen, other
    ranks: some local plan is a new one, and all ranks plan again. torch's own cache belongs to the
    process, where ranks may be threads.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self._group: Collectives | None = None
        self._kept: deque[_Plan] = deque(maxlen=_MOST_KEPT)

    @property
    def final(self) -> SavePlan:
        """What this rank writes."""
        return self._kept[-1].final

    @property
    def metadata(self) -> Metadata:
        """The index of the folder, to be filled in; on rank 0."""
        metadata = self._kept[-1].metadata
        assert metadata is not None
        return copy(metadata)

    def numbers_of(self, local: SavePlan, group: Collectives | None) -> set[int]:
        """Return the numbers of the plans with this local plan; other ranks may have changed."""
        if group is not self._group:
            return set()
        return {one.number for one in self._kept if one.local == local}

    def choose(self, number: int) -> None:
        """Take up a plan that is kept; each rank must, with the same number."""
        place = [one.number for one in self._kept].index(number)
        chosen = self._kept[place]
        del self._kept[place]
        self._kept.append(chosen)

    def make(
        self,
        local: SavePlan,
        planner: SavePlanner,
        writer: StorageWriter,
        group: Collectives | None,
    ) -> None:
        """Plan with the other ranks, each of which must call."""
        if group is not self._group:
            self._kept.clear()
        locals_ = [local] if group is None else group.all_gather_object(local)
        made: tuple[list[SavePlan], str] = [], ""
        metadata = None
        if group is None or group.rank == 0:
            made, metadata = _global(locals_, planner, writer)
        if group is not None:
            made = group.broadcast_object(made, src=0)
        plans, failure = made
        if failure:
            raise CheckpointError(
                f"The checkpoint was not saved: the ranks' parts do not make up a whole: {failure}."
                f" Earlier checkpoints are as they were."
            )
        final = planner.finish_plan(plans[0 if group is None else group.rank])
        self.num_made, self._group = self.num_made + 1, group
        self._kept.append(_Plan(self.num_made, local, final, metadata))


def _global(
    locals_: list[SavePlan], planner: SavePlanner, writer: StorageWriter
) -> tuple[tuple[list[SavePlan], str], Metadata | None]:
    try:
        plans, metadata = planner.create_global_plan(locals_)
        made: Any = writer.prepare_global_plan(plans)
    except Exception as error:  # torch's, of plans that do not fit together
        return ([], repr(error)), None
    return (made, ""), metadata


_ALIGNMENT = 64  # bytes
FAILED, WORKING, FINISHED = -1, 0, 1
_POLL_SECONDS = 0.1


class SaveCancelledError(Exception):
    """What is raised in a writer whose save has been given up."""


class StagedItems:
    """What one rank writes, as it was when this was made, copied into memory that `buffers` lends.

    Each copy is at a multiple of 64 bytes, and has a storage of its own size: a view would be
    written with all of the buffer.

    Attributes:
        num_bytes: Bytes of all copied tensors.
        num_written: Bytes of those that the writer has asked for.
        cancelled: Once set, the writer ends at the next item.
    """

    def __init__(
        self,
        items: Iterable[WriteItem],
        resolve: Callable[[WriteItem], Tensor | io.BytesIO],
        buffers: HostBuffers,
    ) -> None:
        self._items = list(items)
        resolved = {item.index: resolve(item) for item in self._items}
        tensors = {key: one.detach() for key, one in resolved.items() if isinstance(one, Tensor)}
        self.num_bytes = sum(map(_num_bytes, tensors.values()))
        self.num_written = 0
        self.cancelled = Event()
        self._buffers = buffers
        self._buffer: Tensor | None = buffers.lend(sum(map(_aligned_bytes, tensors.values())))
        self._staged: dict[MetadataIndex, Any] = {**resolved, **_copied(tensors, self._buffer)}

    def resolve_data(self, item: WriteItem) -> Any:
        """Return what the writer asks for; called by the writer's thread."""
        if self.cancelled.is_set():
            raise SaveCancelledError
        value = self._staged[item.index]
        if isinstance(value, Tensor):
            self.num_written += _num_bytes(value)
        return value

    def holds(
        self, items: Iterable[WriteItem], resolve: Callable[[WriteItem], Tensor | io.BytesIO]
    ) -> bool:
        """Whether other items are the same ones, bit by bit."""
        others = list(items)
        return others == self._items and all(
            _are_alike(self._staged[item.index], resolve(item)) for item in others
        )

    def give_back(self) -> None:
        """Let the next save have the memory; nothing reads it any more."""
        self._staged = {}
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None


def _are_alike(copy: Tensor | io.BytesIO, value: Tensor | io.BytesIO) -> bool:
    if isinstance(copy, Tensor) and isinstance(value, Tensor):
        return copy.dtype == value.dtype and torch.equal(_bits(copy), _bits(value.detach().cpu()))
    if isinstance(copy, io.BytesIO) and isinstance(value, io.BytesIO):
        return copy.getbuffer() == value.getbuffer()
    return False


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements as bytes, in which those that are no numbers are alike, too."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _copied(tensors: dict[MetadataIndex, Tensor], buffer: Tensor) -> dict[MetadataIndex, Tensor]:
    """Return copies of tensors in a buffer, complete."""
    copies = dict(zip(tensors, _laid_out(tensors.values(), buffer), strict=True))
    for key, target in copies.items():
        target.copy_(tensors[key], non_blocking=True)
    for device in {one.device for one in tensors.values() if one.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _laid_out(tensors: Iterable[Tensor], buffer: Tensor) -> Iterator[Tensor]:
    memory, at = buffer.numpy(), 0
    for one in tensors:
        if one.layout is not torch.strided or not one.numel():
            yield torch.empty_like(one, device="cpu")
        else:
            flat = torch.frombuffer(memory, dtype=one.dtype, count=one.numel(), offset=at)
            yield flat.view(one.shape)
        at += _aligned_bytes(one)


def _num_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-_num_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT


Staging: TypeAlias = Callable[[SavePlan, SavePlanner], StagedItems | None]
"""Copies what a rank writes by a plan; None where an earlier copy does not hold the same."""


@dataclass(frozen=True)
class ToSave:
    """What is to be saved, and where; alike on each rank but for the elements."""

    path: Any
    state: Mapping[str, Any]
    meta: Mapping[str, Any] | None


class StagedWriter(BoxWriter):
    """Copies what this rank writes by a plan, and writes it when asked."""

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

    begin, plan,   on the ranks' own threads, which talk to each other once (and to plan anew);
    copy           nothing is on the disk yet
    write          this rank's file, and on rank 0 meta.pt: in the thread
    link           the same where another folder has the same elements: one file with two names
    complete       index, checksums and the folder's name: in rank 0's thread
    """

    def __init__(
        self, saved: ToSave, collectives: Collectives | None, plans: SavePlans, staging: Staging
    ) -> None:
        self.path = saved.path
        self.written: Any = None
        self._rank = 0 if collectives is None else collectives.rank
        with ExitStack() as stack:
            self._meta: memoryview | None = None
            made: tuple[OpenFolder | None, str] = None, ""
            if self._rank == 0:
                made = made_folder(saved.path, stack, partial(self._keep, saved.meta))
            self._begin(made, saved.state, collectives, plans)
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
        with _explaining(self.path):
            meta = self._write_meta()
            results = self.writer.write_staged()
            self.written = results, self.writer.checksums | meta

    def link(self, other: "UnfinishedFolder") -> None:
        """Give this rank's files in `other`, which has the same elements, second names here."""
        with _explaining(self.path):
            meta = self._write_meta()
            names = self._folder.take_over(other._folder, list(other.writer.checksums))
            results, sums = other.written
            found = {names[name]: one for name, one in sums.items() if name in names}
            self.written = renamed(results, names), {**found, **meta}

    def complete(self, written: Sequence[Any]) -> None:
        """Complete the folder from what all ranks have written, and give it its name."""
        with _explaining(self.path):
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


@contextmanager
def _explaining(path: Any) -> Iterator[None]:
    """Raise the operating system's reason where there is one: torch tells another story."""
    try:
        yield
    except BaseException as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        if found is None:
            raise
        raise not_saved(path, found) from error


def explained(failed: Mapping[int, str]) -> str:
    """Return what is told on every rank of those that have failed, first by themselves."""
    own = {rank: one for rank, one in failed.items() if SaveCancelledError.__name__ not in one}
    told = "; ".join(f"rank {rank}: {one}" for rank, one in (own or failed).items())
    return (
        f"A checkpoint that was being written while training went on was not saved ({told}). "
        f"Earlier checkpoints are as they were."
    )


class SaveInFlight:
    """A checkpoint that is copied, then written; collective, with one path."""

    def __init__(
        self, saved: ToSave, collectives: Collectives | None, buffers: HostBuffers, plans: SavePlans
    ) -> None:
        self._collectives = None if collectives is None or collectives.size == 1 else collectives
        self._rank = 0 if self._collectives is None else self._collectives.rank

        def staging(plan: SavePlan, planner: SavePlanner) -> StagedItems:
            return StagedItems(plan.items, planner.resolve_data, buffers)

        first = UnfinishedFolder(saved, self._collectives, plans, staging)
        assert first.writer.staged is not None
        self.staged = first.writer.staged
        self._folders, self._plans = [first], plans
        self._afterwards: deque[Callable[[], None]] = deque()
        self._is_placing = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-save")
        self._jobs: list[Future[None]] = []
        self.is_started = False

    def start(self) -> None:
        """Let the thread write, once every rank is known to have its copy."""
        self.is_started = True
        self._jobs.append(self._executor.submit(self._folders[0].write))

    @property
    def paths(self) -> list[Any]:
        """Where its folders are to be."""
        return [folder.path for folder in self._folders]

    def join(self, saved: ToSave) -> bool:
        """Have a second folder of the same elements written along; each rank must call.

        Returns:
            Whether it will be. If not, some rank has other elements than before; `meta` may differ.

        Raises:
            CheckpointError: Some rank could not begin.
        """
        if self._is_placing or os.fspath(saved.path) in map(os.fspath, self.paths):
            return False
        if not on_one_filesystem(saved.path, self.paths[0]):
            return False

        def staging(plan: SavePlan, planner: SavePlanner) -> StagedItems | None:
            same = self.staged.holds(plan.items, planner.resolve_data)
            return self.staged if same else None

        first = self._folders[0]
        folder = UnfinishedFolder(saved, self._collectives, self._plans, staging)
        if not all(self._gather(folder.has_copy)):
            folder.discard()
            return False
        self._folders.append(folder)
        self._jobs.append(self._executor.submit(folder.link, first))
        return True

    @property
    def progress(self) -> int:
        """Whether this rank's thread has FAILED, is WORKING or has FINISHED its phase."""
        if any(job.done() and job.exception() is not None for job in self._jobs):
            return FAILED
        return FINISHED if all(job.done() for job in self._jobs) else WORKING

    def then(self, action: Callable[[], None]) -> None:
        """Have rank 0 do something once the folder is in its place, and never if that fails."""
        if self._rank == 0:
            self._afterwards.append(action)

    def advance(self, *, has_failed: bool) -> bool:
        """Go to the next phase, once all ranks are ready or one has failed; each rank must call."""
        if has_failed:
            self.staged.cancelled.set()
        told = self._gather((self._wait(), [folder.written for folder in self._folders]))
        failed = {rank: one for rank, (one, _) in enumerate(told) if one is not None}
        if failed:
            self.discard()
            raise CheckpointError(explained(failed))
        if self._is_placing:
            self._end()
            return True
        self.staged.give_back()
        self._is_placing = True
        self._jobs = []
        if self._rank == 0:
            self._jobs = [self._executor.submit(self._put_in_place, [own for _, own in told])]
        return False

    def finish(self, tell: Callable[[int], None] = lambda _: None) -> None:
        """Wait until the checkpoint is complete; each rank must call.

        `tell` is told at times how many bytes of this rank's are written.
        """
        while True:
            while wait(self._jobs, _POLL_SECONDS).not_done:
                tell(self.staged.num_written)
            tell(self.staged.num_written)
            if self.advance(has_failed=False):
                return

    def discard(self) -> None:
        """Give the save up, and remove what this rank has written of it; no other rank is asked."""
        self.staged.cancelled.set()
        self._wait()
        self._afterwards.clear()
        for folder in self._folders:
            folder.discard()
        self._end()

    def _end(self) -> None:
        self._do_afterwards()
        self.staged.give_back()
        self._executor.shutdown(wait=False)

    def _put_in_place(self, written: list[list[Any]]) -> None:
        """Complete the folders; runs in rank 0's thread."""
        for number, folder in enumerate(self._folders):
            folder.complete([each[number] for each in written])
        self._do_afterwards()

    def _do_afterwards(self) -> None:
        while self._afterwards:
            self._afterwards.popleft()()

    def _wait(self) -> str | None:
        """Wait for this rank's thread, and return why it has failed; None where it has not."""
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        if not errors:
            return None
        first = errors[0]
        return str(first) if isinstance(first, CheckpointError) else repr(first)

    def _gather(self, own: Any) -> list[Any]:
        return [own] if self._collectives is None else self._collectives.all_gather_object(own)


class BackgroundSaves:
    """The saves of one rank, the last of which may be in flight."""

    def __init__(self) -> None:
        self._is_open = False  # between the first and the last step of a fit, if asked for
        self._device = torch.device("cpu")
        self._shows_progress = False
        self._collectives: Collectives | None = None  # of the save in flight, as all below
        self._in_flight: SaveInFlight | None = None
        self._step = -1
        self._to_remove: Collection[str] = ()  # once it is complete
        self._buffers: HostBuffers | None = None
        self._plans = SavePlans()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        own = {"_in_flight": None, "_buffers": None, "_collectives": None, "_plans": SavePlans()}
        return {**vars(self), **own}

    def open(self, device: torch.device, *, shows_progress: bool) -> None:
        """From here on saves may go on in the background; the last one may show a bar."""
        self._is_open, self._device, self._shows_progress = True, device, shows_progress

    def close(self) -> None:
        """From here on saves are complete at once; the one in flight stays."""
        self._is_open = False

    def write(
        self,
        path: Any,
        state: Mapping[str, Any],
        meta: Mapping[str, Any] | None,
        collectives: Collectives | None,
        *,
        step: int | None,
    ) -> None:
        """Write a folder now, or copy it for `start`; each rank of the group must call.

        Args:
            path: Local, or any path of fsspec's.
            state: What this rank has: boxes, tensors and values.
            meta: Lightning's other entries, on rank 0 alone.
            collectives: All ranks that write; None where one has everything.
            step: Step of the fit, which goes on meanwhile; None writes the folder now.

        Raises:
            CheckpointError: Some rank could not write, or could not finish the save before.
        """
        if step is None or not self._is_open:
            self.finish()
            write_folder(path, state, meta, collectives)
            return
        saved = ToSave(path, state, meta)
        may_join = step == self._step and os.fspath(path) not in self._to_remove
        if may_join and self._in_flight is not None and self._in_flight.join(saved):
            return
        self.finish()
        if self._buffers is None:
            self._buffers = HostBuffers(pinned=self._device.type == "cuda")
        self._in_flight = SaveInFlight(saved, collectives, self._buffers, self._plans)
        self._collectives, self._step, self._to_remove = collectives, step, ()

    def start(self) -> None:
        """Have threads write what has been copied, where that is so on every rank."""
        if self._in_flight is not None and not self._in_flight.is_started:
            self._in_flight.start()

    def drop_copy(self) -> None:
        """Give up what has been copied and not started; no other rank is asked."""
        if self._in_flight is not None and not self._in_flight.is_started:
            self.discard()

    def finish(self) -> None:
        """Wait until the save in flight is complete, if there is one; each rank must call."""
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        total, hidden = save.staged.num_bytes, not self._shows_progress
        with tqdm(
            total=total, desc="Saving", unit="B", unit_scale=True, leave=False, disable=hidden
        ) as bar:
            save.finish(lambda done: bar.update(done - bar.n))

    def advance(self) -> None:
        """Ask whether all ranks are ready with the save in flight; each rank must call."""
        save = self._in_flight
        if save is None:
            return
        slowest = self._least(save.progress)
        if slowest == FAILED:
            self._in_flight = None
        if slowest in (FAILED, FINISHED) and save.advance(has_failed=slowest == FAILED):
            self._in_flight = None

    def _least(self, progress: int) -> int:
        if self._collectives is None or self._collectives.size == 1:
            return progress
        flag = torch.tensor(progress, device=self._device)
        self._collectives.all_reduce(flag, "min").wait()
        return int(flag)

    def end(self, error: BaseException, *, is_common: bool) -> None:
        """Close before callbacks hear of an exception, which notes what becomes of the last save.

        `is_common` says whether all ranks have raised at the same place, and call this, too.
        """
        self.close()
        if not is_common:
            if self._in_flight is not None:
                error.add_note(
                    f"The checkpoint {self._in_flight.paths[0]} was still being written, and is "
                    f"given up; those before it are as they were."
                )
            self.discard()
            return
        try:
            self.finish()
        except CheckpointError as another:
            error.add_note(f"After this error: {another}")

    def discard(self) -> None:
        """Give up the save in flight, if there is one; no other rank is asked."""
        if self._in_flight is not None:
            save, self._in_flight = self._in_flight, None
            save.discard()

    def tear_down(self) -> None:
        """Close, give up what is in flight and let go of memory; no other rank is asked."""
        self.close()
        self.discard()
        self._buffers = self._collectives = None
        self._plans = SavePlans()

    def will_exist(self, path: Any, is_there: bool) -> bool:
        """Whether there will be a checkpoint once no save is in flight; the same on all ranks."""
        if self._in_flight is None:
            return is_there
        coming = map(os.fspath, self._in_flight.paths)
        return (is_there or path in coming) and os.fspath(path) not in self._to_remove

    def once_complete(self, action: Callable[[], None]) -> bool:
        """Have rank 0 do something once the save in flight is complete; False if there is none."""
        if self._in_flight is not None:
            self._in_flight.then(action)
        return self._in_flight is not None

    def remove_later(self, path: Any, remove: Callable[[Any], None]) -> bool:
        """Remove a checkpoint once the save in flight is complete; False if there is none.

        Until then it may be the last one. A thread of rank 0's does it, which is no rank.
        """
        if not self.once_complete(lambda: remove(path)):
            return False
        self._to_remove = {*self._to_remove, os.fspath(path)}
        return True
