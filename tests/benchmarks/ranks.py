"""Start ranks of one thread each as fresh processes, joined by Gloo over loopback, or NCCL on GPUs.

The parent holds the rendezvous store on a port that the system chose, so two benchmarks can run at
once. What rank 0's function returns comes back to the caller; a rank that raises ends the others,
and the caller sees its traceback.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_shard.core.settings import prefer_loopback_for_gloo
from tests.mpirun import run_mpi

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

NUM_RANKS = 2
DEVICES = ("cpu", "cuda")
TIMEOUT = timedelta(minutes=5)
MPI_SECONDS = 3600.0


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Ranks:
    """How many ranks, and on what."""

    size: int = NUM_RANKS
    device_type: str = "cpu"
    under_mpi: bool = False

    @property
    def backend(self) -> str:
        """Name of torch's backend of the default group."""
        return "nccl" if self.device_type == "cuda" else "gloo"

    def __str__(self) -> str:
        what = "GPUs over NCCL" if self.device_type == "cuda" else "Gloo ranks of one thread"
        return f"{self.size} {what}"

    def run(
        self,
        fn: Callable[Concatenate[int, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run a function of a module on every rank, its number first; return rank 0's result."""
        store = make_store(0, is_master=True)
        if self.under_mpi:
            return self._run_under_mpi(store.port, fn, args, kwargs)
        with tempfile.TemporaryDirectory() as folder, environment({"OMP_NUM_THREADS": "1"}):
            result_path = Path(folder) / "result.pickle"
            rank_args = (self, store.port, result_path, fn, args, kwargs)
            spawn(_run_rank, rank_args, nprocs=self.size)  # type: ignore[no-untyped-call]
            result: Result = pickle.loads(result_path.read_bytes())
        return result

    def _run_under_mpi(
        self,
        port: int,
        fn: Callable[..., Result],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Result:
        with environment({"OMP_NUM_THREADS": "1"}):
            results: list[Result] = run_mpi(
                _run_mpi_rank,
                self.size,
                timeout_seconds=MPI_SECONDS,
                ranks=self,
                port=port,
                fn=fn,
                args=args,
                kwargs=kwargs,
            )
        return results[0]


def ranks_on(device_type: str, size: int) -> Ranks:
    """Return CPU ranks, or one for each GPU; end the program where there is no GPU."""
    if device_type == "cpu":
        return Ranks(size)
    if not torch.cuda.is_available():
        sys.exit(f"Nothing was measured: torch {torch.__version__} sees no CUDA device.")
    return Ranks(torch.cuda.device_count(), device_type)


def on_ranks(
    fn: Callable[Concatenate[int, Arguments], Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Run `fn` on two CPU ranks; see `Ranks.run`."""
    return Ranks().run(fn, *args, **kwargs)


def own_device() -> torch.device:
    """Return the device of this rank."""
    is_on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


def finish() -> None:
    """Wait until all ranks have done what was asked of them; each rank calls."""
    if own_device().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def make_store(port: int, *, is_master: bool) -> dist.TCPStore:  # type: ignore[name-defined]
    """Open the store that the ranks meet at; port 0 lets the system choose."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=TIMEOUT
    )


def _run_rank(
    rank: int,
    ranks: Ranks,
    port: int,
    result_path: Path,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    result = _called(rank, ranks, port, fn, args, kwargs)
    if rank == 0:
        result_path.write_bytes(pickle.dumps(result))


def _run_mpi_rank(
    ranks: Ranks,
    port: int,
    fn: Callable[..., Result],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Result:
    from mpi4py import MPI

    return _called(MPI.COMM_WORLD.Get_rank(), ranks, port, fn, args, kwargs)


def _called(
    rank: int,
    ranks: Ranks,
    port: int,
    fn: Callable[..., Result],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Result:
    """Join the other ranks, and call `fn`."""
    torch.set_num_threads(1)
    prefer_loopback_for_gloo()
    store = make_store(port, is_master=False)
    if ranks.device_type == "cuda":
        torch.cuda.set_device(rank)
    joining = {"store": store, "rank": rank, "world_size": ranks.size, "timeout": TIMEOUT}
    dist.init_process_group(ranks.backend, **joining)
    try:
        result = fn(rank, *args, **kwargs)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result
