"""Saves of folders, at once or while a fit trains, and where in a run these come to their end.

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

A save at once goes through the same phases, and each rank's own thread does the work.

A thread that fails takes all of them along, and the folder is removed.

torch's `async_save` is not used: its thread (or process) talks to other ranks while training does,
which needs a second group and mixes up collectives where ranks are threads; its stagers copy all
that a rank has, before it is known which rank writes what; and its failures are in a future that
each rank sees at another step. torch's cache of plans keeps one, and belongs to the process.
"""

import io
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Event
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.packing import bits_of
from lightning_shard.checkpoint.files.new import explaining_failures, new_folder
from lightning_shard.checkpoint.files.open_folder import (
    META_FILE,
    Checksum,
    OpenFolder,
    complete_folder,
    on_one_filesystem,
)
from lightning_shard.checkpoint.files.torch_archive import (
    ArchiveRecord,
    bytes_of,
    records_of,
    write_archive,
)
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor, index_of, write_boxes
from lightning_shard.checkpoint.sharded.folder import text_of, with_keys
from lightning_shard.errors import CheckpointError

_MOST_KEPT = 3  # within an epoch, at its end, and one that somebody else has made necessary


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


class _Plan(NamedTuple):
    """What one rank keeps of a plan that all have made: what it writes, and rank 0's index."""

    local: SavePlan
    final: SavePlan
    metadata: Metadata | None


class SavePlans:
    """The plans of one rank's last saves, the latest of which is last.

    The local plans of most saves are those of an earlier one, and then so is the global one, which
    all ranks make together. A first optimizer step, parameters that are frozen or unfrozen, other
    ranks: some local plan is a new one, and all ranks plan again.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self._group: Collectives | None = None
        self._kept: dict[int, _Plan] = {}  # by number

    def numbers_of(self, local: SavePlan, group: Collectives | None) -> set[int]:
        """Return the numbers of the plans with this local plan; other ranks may have changed."""
        is_same = group is self._group
        return {number for number, one in self._kept.items() if is_same and one.local == local}

    def choose(self, number: int) -> _Plan:
        """Take up a plan that is kept; each rank must, with the same number."""
        self._kept[number] = self._kept.pop(number)
        return self._kept[number]

    def make(self, local: SavePlan, planner: SavePlanner, group: Collectives | None) -> _Plan:
        """Plan with the other ranks, each of which must call."""
        if group is not self._group:
            self._kept.clear()
        elif len(self._kept) == _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        locals_ = [local] if group is None else group.all_gather_object(local)
        made: tuple[list[SavePlan], str] = [], ""
        metadata = None
        if group is None or group.rank == 0:
            made, metadata = _global(locals_, planner)
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
        self._kept[self.num_made] = _Plan(local, final, metadata)
        return self._kept[self.num_made]


def _global(
    locals_: list[SavePlan], planner: SavePlanner
) -> tuple[tuple[list[SavePlan], str], Metadata | None]:
    try:
        plans, metadata = planner.create_global_plan(locals_)
    except Exception as error:  # torch's, of plans that do not fit together
        return ([], repr(error)), None
    return (plans, ""), metadata


_ALIGNMENT = 64  # bytes
FAILED, WORKING, FINISHED = -1, 0, 1
_POLL_SECONDS = 0.1


class SaveCancelledError(Exception):
    """What is raised in a writer whose save has been given up."""


class StagedItems:
    """What one rank writes, as it was when this was made, copied into memory that `buffers` lends.

    Each copy is at a multiple of 64 bytes, and has a storage of its own size: a view would be
    written with all of the buffer. Without buffers the items are written as they are then.
    """

    def __init__(
        self,
        items: Iterable[WriteItem],
        resolve: Callable[[WriteItem], Tensor | io.BytesIO],
        buffers: HostBuffers | None,
    ) -> None:
        self._items = list(items)
        resolved = {item.index: resolve(item) for item in self._items}
        tensors = {key: one.detach() for key, one in resolved.items() if isinstance(one, Tensor)}
        self.num_bytes = sum(map(_num_bytes, tensors.values()))
        self.num_written = 0
        self.cancelled = Event()
        self._buffers, self._buffer = buffers, None
        self._staged: dict[MetadataIndex, Any] = resolved
        if buffers is not None:
            self._buffer = buffers.lend(sum(map(_aligned_bytes, tensors.values())))
            self._staged |= _copied(tensors, self._buffer)

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
        if self._buffers is not None and self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None


def _are_alike(copy: Tensor | io.BytesIO, value: Tensor | io.BytesIO) -> bool:
    if isinstance(copy, Tensor) and isinstance(value, Tensor):
        return copy.dtype == value.dtype and torch.equal(bits_of(copy), bits_of(value.cpu()))
    if isinstance(copy, io.BytesIO) and isinstance(value, io.BytesIO):
        return copy.getbuffer() == value.getbuffer()
    return False


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


Staging: TypeAlias = Callable[
    [Sequence[WriteItem], Callable[[WriteItem], Tensor | io.BytesIO]], StagedItems | None
]
"""Copies what a rank writes; None where an earlier copy does not hold the same."""


@dataclass(frozen=True)
class ToSave:
    """What is to be saved, and where; alike on each rank but for the elements."""

    path: Any
    state: Mapping[str, Any]
    meta: Mapping[str, Any] | None


class UnfinishedFolder:
    """A folder that has no name yet; each rank must make one, with the same path.

    begin, plan,   on the ranks' own threads, which talk to each other once (and to plan anew);
    copy           nothing is on the disk yet
    write          this rank's file, and on rank 0 meta.pt: in the thread
    link           the same where another folder has the same elements: one file with two names
    complete       index, checksums and the folder's name: in rank 0's thread
    """

    def __init__(
        self,
        saved: ToSave,
        collectives: Collectives | None,
        plans: SavePlans,
        staging: Staging,
        *,
        copies: bool,
        edition: str = "",
    ) -> None:
        self.path = saved.path
        self.written: Any = None
        self._boxes: dict[str, Checksum] = {}
        self._rank = 0 if collectives is None else collectives.rank
        with ExitStack() as stack:
            self._meta: Sequence[ArchiveRecord] = ()
            made: tuple[OpenFolder | None, str] = None, ""
            if self._rank == 0:
                made = self._made(saved, stack, copies=copies, edition=edition)
            _, final, self._metadata = self._begin(made, saved.state, collectives, plans)
            self._items = final.items
            self.staged = staging(final.items, self._planner.resolve_data)
            self._place = stack.pop_all()

    def _begin(
        self,
        made: tuple[OpenFolder | None, str],
        state: Mapping[str, Any],
        collectives: Collectives | None,
        plans: SavePlans,
    ) -> _Plan:
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
        if standing := known.intersection(*(numbers for _, numbers, _ in told)):
            return plans.choose(max(standing))
        return plans.make(local, self._planner, collectives)

    def _local_plan(self, state: Mapping[str, Any]) -> tuple[SavePlan | None, str]:
        """Return what there is to write on this rank, or None and why nobody can tell."""
        self._planner = BoxSavePlanner()
        try:
            self._planner.set_up_planner(dict(state), is_coordinator=self._rank == 0)
            return self._planner.create_local_plan(), ""
        except Exception as error:  # torch's, of what it cannot save
            return None, repr(error)

    def _made(
        self, saved: ToSave, stack: ExitStack, *, copies: bool, edition: str
    ) -> tuple[OpenFolder | None, str]:
        """Make the folder and pickle meta.pt, on rank 0; return None and why if that cannot be."""
        try:
            folder = stack.enter_context(new_folder(saved.path, edition=edition))
            self._meta = records_of(saved.meta)
            if copies:
                self._meta = [
                    one._replace(content=bytes(bytes_of(one.content, one.num_bytes)))
                    for one in self._meta
                ]
        except CheckpointError as error:
            return None, str(error)
        except Exception as error:  # of an object that is pickled, any
            return None, (
                f"{saved.path} was not saved: {type(error).__name__}: {error}. What was there "
                f"before is as it was. Let the module and callbacks keep what can be pickled."
            )
        return folder, ""

    def write(self) -> None:
        """Write this rank's files; runs in the thread."""
        with explaining_failures(self.path):
            meta = self._write_meta()
            results, self._boxes = self.write_boxes()
            self.written = results, self._boxes | meta

    def write_boxes(self) -> tuple[list[WriteResult], dict[str, Checksum]]:
        """Write what was copied, or is as it was."""
        assert self.staged is not None
        return write_boxes(self._folder, self._rank, self._items, self.staged.resolve_data)

    def link(self, other: "UnfinishedFolder") -> None:
        """Give this rank's files in `other`, which has the same elements, second names here."""
        with explaining_failures(self.path):
            meta = self._write_meta()
            self._folder.take_over(other._folder, other._boxes)
            results, _ = other.written
            self.written = results, other._boxes | meta

    def complete(self, written: Sequence[Any]) -> None:
        """Complete the folder from what all ranks have written, and give it its name."""
        with explaining_failures(self.path):
            assert self._metadata is not None
            places = [results for results, _ in written]
            index = index_of(self._metadata, places, self._folder.path)
            sums = {name: one for _, each in written for name, one in each.items()}
            complete_folder(self._folder, index, sums)
            self._place.close()

    def discard(self) -> None:
        """Remove the folder, on rank 0."""
        with suppress(SaveCancelledError), self._place:
            raise SaveCancelledError

    def _write_meta(self) -> dict[str, Checksum]:
        if not self._meta:
            return {}
        records, self._meta = self._meta, ()
        name = self._folder.named(META_FILE)
        with closing(self._folder.create(name)) as file:
            archive = write_archive(cast("BinaryIO", file), records)
            file.finish()
            return {name: {"bytes": file.tell(), "crc32": f"{archive.crc:08x}"}}


def explained(failed: Mapping[int, str]) -> str:
    """Return what is told on every rank of those that have failed, first by themselves."""
    own = {rank: one for rank, one in failed.items() if SaveCancelledError.__name__ not in one}
    told = "; ".join(f"rank {rank}: {one}" for rank, one in (own or failed).items())
    return (
        f"A checkpoint was not saved ({told}). Mend that, and save again; earlier checkpoints are "
        f"as they were."
    )


class _AtOnce(Executor):
    """Does what it is given in the thread that gives it."""

    @override
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class SaveInFlight:
    """A checkpoint that is copied, or without buffers is not, then written; collective."""

    def __init__(
        self,
        saved: ToSave,
        collectives: Collectives | None,
        buffers: HostBuffers | None,
        plans: SavePlans,
    ) -> None:
        self._collectives = None if collectives is None or collectives.size == 1 else collectives
        self._rank = 0 if self._collectives is None else self._collectives.rank
        staging = partial(StagedItems, buffers=buffers)
        copies = buffers is not None
        first = UnfinishedFolder(saved, self._collectives, plans, staging, copies=copies)
        assert first.staged is not None
        self.staged = first.staged
        self._folders, self._plans = [first], plans
        self._afterwards: deque[Callable[[], None]] = deque()
        self._is_placing = False
        self._executor: Executor = _AtOnce()
        if copies:
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
        """Have a second folder of the same elements written along, if it can be; each must call."""
        if self._is_placing or os.fspath(saved.path) in map(os.fspath, self.paths):
            return False
        if not on_one_filesystem(saved.path, self.paths[0]):
            return False

        def staging(*items: Any) -> StagedItems | None:
            return self.staged if self.staged.holds(*items) else None

        first = self._folders[0]
        edition = first._folder.edition  # so that the files have the same names
        folder = UnfinishedFolder(
            saved, self._collectives, self._plans, staging, copies=True, edition=edition
        )
        if not all(self._gather(folder.staged is not None)):
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
        failure = self._wait()
        written = [] if self._is_placing else [folder.written for folder in self._folders]
        told = self._gather((failure, written))
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
        """Wait until the checkpoint is complete, telling bytes written; each rank must call."""
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


def write_folder(
    path: Any,
    state: Mapping[str, Any],
    meta: Mapping[str, Any] | None,
    collectives: Collectives | None,
    plans: SavePlans | None = None,
) -> None:
    """Write a checkpoint, which takes its place once it is whole on disk; collective."""
    save = SaveInFlight(ToSave(path, state, meta), collectives, None, plans or SavePlans())
    try:
        save.start()
        save.finish()
    except BaseException:
        save.discard()
        raise


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
        """Write a folder now, or where `step` is told copy it for `start`; each rank must call."""
        if step is None or not self._is_open:
            self.finish()
            write_folder(path, state, meta, collectives, self._plans)
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
        """Close before callbacks hear of an exception, `is_common` to all ranks or not."""
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
        """Remove a checkpoint once the save in flight is complete; False if there is none."""
        if not self.once_complete(lambda: remove(path)):
            return False
        self._to_remove = {*self._to_remove, os.fspath(path)}
        return True
