"""Where the suite runs: each backend, on each number of ranks, and how its ranks start."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends import exchange
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.shm import backend as shm_backend
from lightning_shard.testing import run_ranks
from tests.backends.conformance import facade
from tests.backends.conformance.suite import CHECKS, Outcome, read_outcome, run_all
from tests.mpirun import run_mpi
from tests.processes import ProcessesFailedError, rank_and_world_size, run_processes

_TIMEOUT = timedelta(seconds=20)
_START_SECONDS = 200
_LIMITS = ("_DIRECT_BYTES", "_DIRECT_BYTES_OF_FEW")


@dataclass(frozen=True, kw_only=True)
class World:
    """A backend on a number of ranks.

    Attributes:
        name: Of the row in the test's id.
        backend: The backend's name.
        size: The number of ranks.
        device_type: Of the tensors.
        start: Starts processes; None runs the ranks here.
        algorithms: Of ranks of this process: "direct" exchanges all-reduces of any size, "ring"
            none; then only the facade is checked, c10d's own methods are the same.
        hosts: A letter for each rank's host, as processes that pretend to be on several.
        marks: The tests' markers.
    """

    name: str
    backend: str
    size: int
    device_type: str = "cpu"
    start: Callable[..., list[Any]] | None = None
    algorithms: str = ""
    hosts: str = ""
    marks: tuple[pytest.MarkDecorator, ...] = field(default=(), hash=False)

    @property
    def checks(self) -> list[str]:
        """The names of the checks to run."""
        return [
            name
            for name, check in CHECKS.items()
            if not self.algorithms or check.__module__ == facade.__name__
        ]

    def outcomes(self, check: str) -> list[Outcome]:
        """Return how a check ended on every rank, or on the first to fail here."""
        if self.start is None:
            return [run_here(self, check)]
        return outcomes_of_processes(self)[check]


def run_here(world: World, check: str) -> Outcome:
    """Run one check in an in-process world of its own."""

    def body(rank: int) -> None:
        with device:
            CHECKS[check](default_collectives(world.backend, world.algorithms))

    device = torch.device(world.device_type)
    try:
        with chosen_algorithms(world.algorithms):  # once, not by each rank: it is for the process
            run_ranks(body, world.size)
    except Exception as error:
        return Outcome.of(error)
    return Outcome()


@cache
def outcomes_of_processes(world: World) -> dict[str, list[Outcome]]:
    """Start the world's processes once and run every check in them."""
    assert world.start is not None
    names, ranks = world.checks, range(world.size)
    with tempfile.TemporaryDirectory() as folder:
        output = ""
        try:
            world.start(
                join_and_run_all,
                world.size,
                timeout_seconds=_START_SECONDS,
                backend=world.backend,
                device_type=world.device_type,
                names=names,
                folder=folder,
                hosts=world.hosts,
            )
        except ProcessesFailedError as error:
            output = str(error)
        found = {name: [read_outcome(folder, name, rank) for rank in ranks] for name in names}
    culprit = next((name for name, outcomes in found.items() if None in outcomes), "")
    previous = _before(names, culprit)
    absent = Outcome(
        error="NotRunError",
        report=f"not run on this rank; the last check that every rank ended is {previous!r}, the "
        f"first that not every rank ended {culprit!r}\n{output}",
    )
    return {name: [one or absent for one in outcomes] for name, outcomes in found.items()}


def _before(names: list[str], name: str) -> str:
    return names[names.index(name) - 1] if name in names[1:] else ""


def join_and_run_all(
    backend: str, device_type: str, names: list[str], folder: str, hosts: str
) -> None:
    """Join the world of processes that this one was started in, and run checks in it."""
    chosen = get_backend(backend)
    rank, size = rank_and_size(backend)
    if hosts:
        patch.object(shm_backend, "own_host", lambda: hosts[rank]).start()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen.check(device)
    chosen.init_process_group(rank=rank, world_size=size, device=device, timeout=_TIMEOUT)
    try:
        run_all(default_collectives(backend), device, names, folder)
    finally:
        dist.destroy_process_group()


def rank_and_size(backend: str) -> tuple[int, int]:
    """Ask the launcher which rank this is, of how many."""
    if backend == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    return rank_and_world_size()


def default_collectives(backend: str, algorithms: str = "") -> Collectives:
    """Return the facade over the default group; with chosen algorithms, the one that has any."""
    group = dist.group.WORLD
    assert group is not None
    return ExchangeCollectives(group) if algorithms else get_backend(backend).collectives(group)


@contextmanager
def chosen_algorithms(algorithms: str) -> Iterator[None]:
    """Move the limit up to which all-reduces are exchanged: to nothing, or to any size."""
    limits = {"": {}, "ring": dict.fromkeys(_LIMITS, 0), "direct": dict.fromkeys(_LIMITS, 1 << 40)}
    with patch.multiple(exchange, **limits[algorithms]) if algorithms else nullcontext():
        yield


_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
_MPI = (pytest.mark.mpi,)
_SLOW = (pytest.mark.slow,)


WORLDS = [
    *(World(name="in_process", backend="in_process", size=size) for size in (1, 2, 3, 4)),
    World(name="in_process", backend="in_process", size=7, marks=_SLOW),
    World(name="gloo", backend="gloo", size=2, start=run_processes, marks=_SLOW),
    World(name="gloo", backend="gloo", size=3, start=run_processes),
    World(name="shm", backend="shm", size=2, start=run_processes, marks=_SLOW),
    World(name="shm", backend="shm", size=3, start=run_processes),
    World(name="shm_2x2", backend="shm", size=4, start=run_processes, hosts="AABB"),
    *(
        World(
            name=name, backend="shm", size=len(hosts), start=run_processes, hosts=hosts, marks=_SLOW
        )
        for name, hosts in (("shm_mixed", "ABAB"), ("shm_uneven", "AAB"), ("shm_apart", "AB"))
    ),
    World(name="mpi", backend="mpi", size=2, start=run_mpi, marks=(*_MPI, *_SLOW)),
    World(name="mpi", backend="mpi", size=3, start=run_mpi, marks=(*_MPI, *_SLOW)),
    World(
        name="nccl",
        backend="nccl",
        size=max(1, torch.cuda.device_count()),
        device_type="cuda",
        start=run_processes,
        marks=_GPU,
    ),
    World(name="in_process_cuda", backend="in_process", size=2, device_type="cuda", marks=_GPU),
    *(
        World(name=f"exchange_{algorithms}", backend="in_process", size=size, algorithms=algorithms)
        for algorithms in ("ring", "direct")
        for size in (3, 4)
    ),
    *(
        World(
            name=f"exchange_{algorithms}",
            backend="in_process",
            size=size,
            algorithms=algorithms,
            marks=_SLOW,
        )
        for algorithms in ("ring", "direct")
        for size in (1, 2)
    ),
]
