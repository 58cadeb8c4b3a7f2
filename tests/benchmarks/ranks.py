"""Start ranks of one thread each as fresh processes, joined by Gloo over loopback.

The parent holds the rendezvous store on a port that the system chose, so two benchmarks can run at
once. What rank 0's function returns comes back to the caller; a rank that raises ends the others,
and the caller sees its traceback.
"""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_shard.settings import prefer_loopback_for_gloo

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

NUM_RANKS = 2
TIMEOUT = timedelta(minutes=5)


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


def on_ranks(
    fn: Callable[Concatenate[int, Arguments], Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Run `fn(rank, *args, **kwargs)` on every rank and return rank 0's result.

    Args:
        fn: A module-level function; `torch.distributed` is initialised when it is called.
        *args: Picklable.
        **kwargs: Picklable.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank raised; holds its traceback.
    """
    store = make_store(0, is_master=True)
    with tempfile.TemporaryDirectory() as folder, environment({"OMP_NUM_THREADS": "1"}):
        result_path = Path(folder) / "result.pickle"
        rank_args = (store.port, result_path, fn, args, kwargs)
        spawn(_run_rank, rank_args, nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]
        result: Result = pickle.loads(result_path.read_bytes())
    return result


def make_store(port: int, *, is_master: bool) -> dist.TCPStore:  # type: ignore[name-defined]
    """Open the store that the ranks meet at; port 0 lets the system choose."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=TIMEOUT
    )


def _run_rank(
    rank: int,
    port: int,
    result_path: Path,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    torch.set_num_threads(1)
    prefer_loopback_for_gloo()
    store = make_store(port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    try:
        result = fn(rank, *args, **kwargs)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        result_path.write_bytes(pickle.dumps(result))
