"""Which rank this process is, and of how many: asked of the membership, told to everybody else.

launcher               who says who takes part         what becomes of the rest on a loss
in process             a membership table in this process        they go on
Lightning's, srun      a rendezvous server beside the ranks       they go on
torchrun               torchelastic's agents           they are ended, and all start anew
Ray Train              Ray's controller                the same

Membership under torchrun or Ray Train, which end all workers when one is lost and start anew.

    who restarts them    start ──> a worker is lost, or a node waits ──> end all ──> start all
    workers                 train, snapshots into shared memory     ✗        map them, go on

Snapshots outlive the processes that took them, as files in memory:

    /dev/shm/lightning_shard-1000-fit1-job7/   of this user alone; one for each fit of a script
        000001-rank0-0.snapshot                complete: counts for whoever starts next
        000001-rank0-2.open                    being written, or idle: passed over

A buffer is such a file, mapped. Its name changes, in one step, once it holds a complete snapshot
and before it is written again, so that nobody reads a part of one, whenever the writer was killed.
"""

import logging
import os
import re
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends._c10d import HashStore
from lightning_shard.backends.authentication.token import JobAddress, make_private_folder
from lightning_shard.backends.in_process.world import ElasticWorld, current_world
from lightning_shard.backends.liveness.job_server import tell_address
from lightning_shard.backends.objects import gather_objects
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.core import settings
from lightning_shard.elastic.membership.generation import (
    Generation,
    GroupSetup,
    Membership,
    end_told,
)
from lightning_shard.elastic.membership.membership_table import (
    SHORTEST_START_SECONDS,
    Bounds,
    MembershipTable,
)
from lightning_shard.elastic.membership.served_membership import ServedMembership
from lightning_shard.environments.elastic import ElasticEnvironment
from lightning_shard.environments.ray import RayEnvironment
from lightning_shard.errors import CheckpointError, ConfigError, RankFailedError

_ROOT = Path("/dev/shm")
_OPEN, _COMPLETE = ".open", ".snapshot"
_UNSAFE = re.compile(r"[^\w.-]")  # in a file's name
_AGENT = re.compile(r"-(\d+)$")
_NUMBER = re.compile(r"(\d{6,})-")


def job_folder(job: str, root: Path | None = None) -> Path:
    """Return the folder of a job on this host, made if need be; nobody else may enter it."""
    root = root or _ROOT
    if not root.is_dir():
        raise ConfigError(
            f"Snapshots that outlive the workers need a folder in memory; {root} is not there. "
            f"Give another folder, on a disk if it must be."
        )
    folder = root / f"lightning_shard-{os.getuid()}-{_UNSAFE.sub('_', job)}"
    make_private_folder(folder, "this job's snapshots", "name the job otherwise")
    return folder


class SharedMemoryBuffers(HostBuffers):
    """Buffers of snapshots in a job's folder."""

    def __init__(self, folder: Path, writer: str, generation: int = 0) -> None:
        super().__init__()
        self._stem = folder / f"{generation:06d}-{_UNSAFE.sub('_', writer)}"
        self._num_made = 0
        self._paths: dict[int, Path] = {}  # by address, without suffix

    @override
    def _make(self, num_bytes: int) -> Tensor:
        path = Path(f"{self._stem}-{self._num_made}{_OPEN}")
        self._num_made += 1
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # else a full memory is a SIGBUS, later
        except OSError as error:
            path.unlink()
            raise CheckpointError(
                f"No room for a snapshot of {num_bytes} bytes in {path.parent}: {error}. Each rank "
                f"needs five there. Make the memory file system larger (docker: --shm-size), or "
                f"give another folder."
            ) from error
        finally:
            os.close(descriptor)
        buffer = _map(path, shared=True)
        self._paths[buffer.data_ptr()] = path
        return buffer

    @override
    def keep(self, data: Tensor) -> None:
        """Let a complete snapshot be found from now on."""
        path = self._paths[data.data_ptr()]
        path.rename(path.with_suffix(_COMPLETE))

    @override
    def give_back(self, data: Tensor) -> None:
        """Take a buffer back, to be written again; one from elsewhere is passed over."""
        path = self._paths.get(data.data_ptr())
        if path is None:
            return
        full = path.with_suffix(_COMPLETE)
        if full.exists():
            full.rename(path)
        super().give_back(data)

    @override
    def forget(self, data: Tensor) -> None:
        """Remove a buffer's name; its memory goes with its last user."""
        self._paths.pop(data.data_ptr()).unlink(missing_ok=True)


def load_all(folder: Path) -> list[Snapshot]:
    """Map every complete snapshot in a folder; they stay readable after `clear`."""
    return [
        Snapshot.read(_map(path, shared=False), is_own=True)
        for path in sorted(folder.glob(f"*{_COMPLETE}"))
    ]


def newest_generation(job: str, root: Path | None = None) -> int:
    """Return the last generation in which a process has left a file in any fit of a job; else 0."""
    folders = (root or _ROOT).glob(f"lightning_shard-{os.getuid()}-*-{_UNSAFE.sub('_', job)}")
    names = (path.name for folder in folders for path in folder.iterdir())
    return max((int(found[1]) for found in map(_NUMBER.match, names) if found), default=0)


def clear(folder: Path, before: int | None = None, writer: str | None = None) -> None:
    """Remove a job's files from memory."""
    mine = None if writer is None else f"-{_UNSAFE.sub('_', writer)}-"
    for path in [*folder.glob(f"*{_COMPLETE}"), *folder.glob(f"*{_OPEN}")]:
        number = _NUMBER.match(path.name)
        is_old = before is None or (number is not None and int(number[1]) < before)
        if is_old or (mine is not None and mine in path.name):
            path.unlink(missing_ok=True)  # another rank may be at it
    if before is None or writer is not None:
        try:
            folder.rmdir()
        except OSError:
            return  # it holds what is not ours, or another rank has removed it


def remove_orphans(root: Path | None = None) -> None:
    """Remove what this user's jobs have left whose agent has gone: nobody will take it up."""
    for folder in (root or _ROOT).glob(f"lightning_shard-{os.getuid()}-*"):
        agent = _AGENT.search(folder.name)
        if agent is not None and not _is_running(int(agent[1])):
            clear(folder)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _map(path: Path, *, shared: bool) -> Tensor:
    """Map the bytes of a file; unless shared, what is written there does not reach the file."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Restarted:
    """One worker of a job that something starts anew as a whole."""

    by: str
    job: str
    rank: int
    world_size: int
    limit: str
    is_killed: bool = False


class RestartMembership(Membership):
    """One worker's part in a job that is restarted."""

    is_wanted = False  # who restarts the workers looks for newcomers
    is_leaving = False

    def __init__(self, setup: GroupSetup, worker: Restarted) -> None:
        self._setup, self._worker = setup, worker
        remove_orphans()
        self._folders: list[Path] = []  # of the fits of this process
        self._generation: Generation | None = None
        self._is_new = True
        self.me = f"rank{worker.rank}"
        self.first_size, self.started_by = worker.world_size, worker.by

    def begin(self) -> Generation:
        """Meet the other workers."""
        self._setup.make(self._worker.rank, self.first_size)
        number = max(self._of_all_ranks(newest_generation(self._worker.job))) + 1
        members = tuple(f"rank{rank}" for rank in range(self.first_size))
        self._generation = Generation(number=number, members=members, me=self.me)
        return self._generation

    def begin_fit(self) -> None:
        """Find what is left of the next fit of the script, whose earlier ones it comes to first."""
        self._folders.append(job_folder(f"fit{len(self._folders) + 1}-{self._worker.job}"))
        self.held = load_all(self._folders[-1])
        self._is_new = True
        self.has_past = any(self._of_all_ranks(bool(self.held)))

    def _of_all_ranks(self, value: int) -> list[int]:
        world = dist.group.WORLD
        assert world is not None  # `begin` has made it
        return gather_objects(world, value)

    def make_buffers(self) -> SharedMemoryBuffers:
        """Return where this rank's snapshots of the present fit are written."""
        assert self._generation is not None
        return SharedMemoryBuffers(self._folders[-1], self.me, self._generation.number)

    def following(self, error: BaseException | None = None) -> Generation:
        """Return the one generation that this process lives in, once."""
        assert self._generation is not None
        if not self._is_new:
            raise RankFailedError(
                f"Rank {self._worker.rank} of {self.first_size} ends because a rank was lost or "
                f"has failed; {self._worker.by} starts all of them again, which go on from their "
                f"snapshots. If it does not, raise its {self._worker.limit}."
            ) from error
        return self._generation

    def init_groups(self, generation: Generation, setup: GroupSetup) -> None:
        """Do nothing: `begin` has made them."""

    def drop_groups(self) -> None:
        """Do nothing: they end with the process."""

    def forget_past(self) -> None:
        """Remove what predecessors have left here, now that there is something newer everywhere."""
        if self._is_new and self._generation is not None:
            self._is_new = False
            self.held = []
            clear(self._folders[-1], before=self._generation.number)

    def end_fit(self) -> None:
        """Remove this process's snapshots where nobody hears of the end of the script."""
        if self._worker.is_killed:
            self.leave()

    def leave(self) -> None:
        """Remove this process's snapshots: the script has ended."""
        assert self._generation is not None
        for folder in self._folders:
            clear(folder, before=self._generation.number, writer=self.me)


class ElasticRanks:
    """This process's part in a job: its membership, and its rank in the present generation.

    It is that of later Trainers of this process, too, `of_process`. Of ranks that are threads each
    has its own, which ends with the run.
    """

    of_process: "ClassVar[ElasticRanks | None]" = None

    def __init__(self) -> None:
        self.has_failed = False
        self._membership: Membership | None = None
        self._generation: Generation | None = None

    @property
    def are_known(self) -> bool:
        """Whether there is a generation, or a newcomer's own."""
        return self._generation is not None

    @property
    def generation(self) -> Generation:
        """Who takes part now; there once the environment is set up."""
        if self._generation is None:
            raise ConfigError("There is no generation before trainer.fit (or validate ...) runs.")
        return self._generation

    @property
    def membership(self) -> Membership:
        """This rank's part in the job; there once the environment is set up."""
        if self._membership is None:
            raise ConfigError("There is no membership before trainer.fit (or validate ...) runs.")
        return self._membership

    @property
    def global_rank(self) -> int:
        """This process's rank; 1 of a newcomer that waits, since it must not write files."""
        return self.generation.rank + (self.generation.number == 0)

    @property
    def world_size(self) -> int:
        """The number of ranks; of a newcomer that waits the first ones', for its schedules."""
        if self.generation.number == 0:
            return self.membership.first_size
        return self.generation.size

    def begin(
        self, membership: Membership, setup: GroupSetup, environment: ClusterEnvironment
    ) -> None:
        """Take part in the job, or wait as a newcomer; each of the first ranks must call."""
        if not isinstance(membership, InProcessMembership):
            ElasticRanks.of_process = self
        self._membership = membership
        first = membership.begin()
        alone = Generation(number=0, members=(membership.me,), me=membership.me)
        self.enter(first or alone, setup, environment)

    def enter(
        self, generation: Generation, setup: GroupSetup, environment: ClusterEnvironment
    ) -> None:
        """Make a generation's default group; each of its members must call."""
        self._generation = generation
        self.tell(environment)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (a function attribute)
        if generation.number == 0 and not isinstance(self._membership, InProcessMembership):
            store: Any = HashStore()
            tell_address(store, JobAddress(host="127.0.0.1", port=0, token=""))
            setup.make(0, 1, store)
        else:
            self.membership.init_groups(generation, setup)

    def tell(self, environment: ClusterEnvironment) -> None:
        """Tell a cluster environment which rank this is."""
        if isinstance(environment, ElasticEnvironment):
            size = max(self.global_rank + 1, self.generation.size)
            environment.admit(self.global_rank, size)

    def end_run(self) -> None:
        """Note that a run has ended; a thread's part in the job ends with it."""
        if self._membership is not None:
            self._membership.end_run()
        if isinstance(self._membership, InProcessMembership):
            self._membership = self._generation = None

    def end_fit(self) -> None:
        """Note that a fit has ended well; what predecessors of a later one need is gone."""
        if isinstance(self._membership, RestartMembership) and not self.has_failed:
            self._membership.end_fit()

    def leave(self) -> None:
        """Leave the job at exit; the silence of a rank that has failed says that it has."""
        if self._membership is not None and not self.has_failed:
            self._membership.leave()


def make_membership(
    bounds: Bounds, setup: GroupSetup, environment: ClusterEnvironment, *, in_process: bool
) -> Membership:
    """Return this rank's part in the job, by how it was launched."""
    if in_process:
        return InProcessMembership(bounds)
    if (worker := restarted_worker(environment)) is not None:
        settings.set_rendezvous(environment.main_address, environment.main_port)
        return RestartMembership(setup, worker)
    assert isinstance(environment, ElasticEnvironment)
    job = settings.job()
    assert job is not None  # the launcher has told it
    rank = None if environment.is_newcomer else environment.global_rank()
    return ServedMembership(job, rank, setup.timeout)


def restarted_worker(environment: ClusterEnvironment) -> Restarted | None:
    """Return which worker this is of a job that is restarted as a whole; None of any other."""
    if isinstance(environment, RayEnvironment):
        return Restarted(
            by="Ray Train",
            job=environment.job,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            limit="FailureConfig(max_failures=...)",
            is_killed=True,
        )
    run = settings.torchrun_job()
    if run is None:
        return None
    place = settings.placement(settings.TORCHRUN)
    return Restarted(
        by="torchrun", job=run, rank=place.rank, world_size=place.world_size, limit="--max-restarts"
    )


_log = logging.getLogger(__name__)
_NEVER = float("inf")


class InProcessMembership(Membership):
    """One rank's part in an elastic job inside an in-process world, made while it runs."""

    def __init__(self, bounds: Bounds) -> None:
        world = current_world()
        if not isinstance(world, ElasticWorld):
            raise ConfigError(
                "InProcessMembership: expected an elastic in-process world to run, got "
                f"{'none' if world is None else 'one whose ranks stay'}. Train with "
                "strategy='elastic_in_process'."
            )
        self._world = world
        self._job = world.shared(_Job, lambda: _Job(world, bounds))
        self.me = f"thread{world.thread}"
        self.first_size = world.num_first_ranks
        self._generation = 0
        self._has_joined = self._has_left = False

    @override
    def begin(self) -> Generation | None:
        if self._world.is_spare:
            return None
        self._join(initial_rank=self._world.thread)
        return self._next_generation()

    @override
    def following(self, error: BaseException | None = None) -> Generation:
        # What peers share with this rank in the last groups raises RankFailedError there.
        self._world.leave_generation(self._generation)
        if not self._has_joined:
            self._join(initial_rank=None)
        told = None if error is None else f"{type(error).__name__}: {error}"
        job = self._job
        job.membership_table.arrive(self.me, self._generation, told, job.now)
        generation = self._next_generation(error)
        assert generation is not None  # only an initial rank can be late
        return generation

    @override
    def init_groups(self, generation: Generation, setup: GroupSetup) -> None:
        if generation.number > 0:
            threads = [self._job.threads[member] for member in generation.members]
            self._world.reconfigure(generation.number, threads)
        setup.make(generation.rank, generation.size)

    @override
    def drop_groups(self) -> None:
        if self._takes_part:
            self._world.drop_groups()

    @property
    @override
    def is_wanted(self) -> bool:
        return self._job.is_wanted[self.me]

    @property
    @override
    def is_leaving(self) -> bool:
        return self._world.is_asked_to_leave

    @override
    def begin_step(self, step: int) -> None:
        self._world.begin_step(step)  # where faults strike

    @override
    def end_run(self) -> None:
        self.leave()  # a thread takes part for one run

    @override
    def leave(self) -> None:
        if not self._has_joined or self._has_left or not self._takes_part:
            return
        self._has_left = True
        self._job.membership_table.leave(self.me, is_done=not self.is_leaving, now=self._job.now)
        self._world.leave_generation(self._generation)

    @property
    def _takes_part(self) -> bool:
        """Whether this rank runs in its world; a dropped one is only being taken down."""
        return current_world() is self._world and not self._world.is_gone

    def _join(self, initial_rank: int | None) -> None:
        job, thread = self._job, self._world.thread
        job.threads[self.me] = thread
        self.me = job.membership_table.join(self.me, initial_rank, job.now)
        job.threads[self.me] = thread
        self._has_joined = True

    def _next_generation(self, error: BaseException | None = None) -> Generation | None:
        """Wait for what the table says of the next generation; None: it began without this one."""
        job = self._job
        inbox = job.inboxes[self.me]
        self._world.wait_for_news(
            lambda: bool(inbox),
            lambda: f"{self.me} waits for the generation after {self._generation}",
            job.let_time_pass,
        )
        message = inbox.popleft()
        match message["kind"]:
            case "generation":
                self._generation = message["number"]
                return Generation.told(message, self.me)
            case "late":
                return None
        raise end_told(message, self.me) from error


class _Job:
    """What the ranks of one world share: the table, and what it has told each member.

    The time stands still while anybody can run.
    """

    def __init__(self, world: ElasticWorld, bounds: Bounds) -> None:
        self.now = 0.0
        self.threads: dict[str, int] = {}
        self.inboxes: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self.is_wanted: defaultdict[str, bool] = defaultdict(bool)
        self._longest_wait = max(bounds.patience_seconds, SHORTEST_START_SECONDS)
        self._texts: set[str] = set()
        self._num_told = 0
        self.membership_table = MembershipTable(
            bounds,
            initial_size=world.num_first_ranks,
            silence_seconds=_NEVER,
            tell=self._take,
            now=self.now,
        )
        world.call_when_ended(self._lose)

    def let_time_pass(self) -> bool:
        """Let the longest of the table's times pass; return whether it had anything to tell."""
        num_told = self._num_told
        self.now += self._longest_wait
        self.membership_table.tick(self.now)
        return self._num_told > num_told

    def _take(self, member: str, message: dict[str, Any]) -> None:
        """Keep what the table tells a member."""
        match message["kind"]:
            case "generation" | "evicted" | "over" | "late":
                self._num_told += 1
                self.is_wanted[member] = False
                self.inboxes[member].append(message)
            case "wanted":
                self.is_wanted[member] = message["is_wanted"]
            case "waiting" if message["text"] not in self._texts:
                self._texts.add(message["text"])
                _log.warning(message["text"])

    def _lose(self, thread: int, event: str) -> None:
        for member, its_thread in list(self.threads.items()):
            if its_thread == thread:
                self.membership_table.lost(member, self.now, event)
