"""MPI: ranks started by mpirun or a cluster's own launcher."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar, cast
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler
from typing_extensions import override

from lightning_shard.backends import _c10d, liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.base import DEFAULT_TIMEOUT, Backend
from lightning_shard.backends.debug_wrapper import debug_name, exchange_collectives, register_debug
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.guarded.store import JobStore, store_at
from lightning_shard.backends.guarded.token import JobAddress, remember
from lightning_shard.backends.meeting_place import serve
from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.mpi.flight import progress
from lightning_shard.backends.mpi.process_group import BACKEND_NAME, MPIGroup
from lightning_shard.backends.object_transfers import guard_torch
from lightning_shard.errors import ConfigError

INIT_METHOD = "mpi://"


class MPIBackend(Backend):
    """CPU and CUDA tensors over MPI, through mpi4py.

    c10d knows it as "mpi4py": `dist.init_process_group("mpi4py", init_method="mpi://")` works in
    any script that mpirun has started, and `dist.new_group` and device meshes follow.
    """

    name: ClassVar[str] = "mpi"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @property
    @override
    def c10d_name(self) -> str:
        return debug_name(BACKEND_NAME) if self.debug else BACKEND_NAME

    @override
    def unavailable_reason(self) -> str | None:
        return runtime.unavailable_reason()

    @override
    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        if store is not None:
            raise ConfigError(
                "mpi: got a store to meet at, expected none: its ranks are those that mpirun has "
                "started, and end together. Pass backend='gloo' or 'nccl' to train elastically."
            )
        _check_place(rank, world_size)
        meeting, rank, world_size = next(_meet(INIT_METHOD, timeout=timeout))
        dist.init_process_group(
            self.c10d_name,
            store=PrefixStore("default_pg", meeting),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        address = cast(JobStore, meeting).address
        liveness.start(
            meeting,
            rank=rank,
            world_size=world_size,
            host=address.host,
            token=address.token,
            timeout=timeout,
        )

    @override
    def collectives(self, group: dist.ProcessGroup) -> ExchangeCollectives:
        return exchange_collectives(group)


def _make_group(options: Any, backend_options: Any) -> Any:
    """Make this rank's handle of a group; c10d calls this function."""
    del backend_options
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    _check_place(rank=ranks[options.group_rank])
    runtime.finalize_in_order(progress.end)
    rank, timeout, store = options.group_rank, options.timeout, options.store
    return MPIGroup(options.group_id, ranks, rank, timeout, store)


def _meet(
    url: str, *, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Make the store of a world that mpirun has started: rank 0 keeps it, MPI tells where.

    c10d calls this for `init_method="mpi://"` and puts what the user gave into the URL's query.
    """
    given = dict(parse_qsl(urlparse(url).query))
    _check_place(int(given.get("rank", -1)), int(given.get("world_size", -1)))
    world = runtime.mpi().COMM_WORLD
    host, token = runtime.host_of_rank_zero(), runtime.job_token()
    remember(token)
    guard_torch()
    port = 0
    if world.rank == 0:
        port = serve(JobAddress(host=host, port=0, token=token)).port
    address = JobAddress(host=host, port=runtime.from_rank_zero(port), token=token)
    yield store_at(address, timeout), world.rank, world.size


def _check_place(rank: int = -1, world_size: int = -1) -> None:
    """Raise unless mpirun has started this rank of this world; -1 stands for nothing given."""
    world = runtime.mpi().COMM_WORLD
    if rank not in (-1, world.rank) or world_size not in (-1, world.size):
        raise ConfigError(
            f"mpi: got rank={rank}, world_size={world_size}, but mpirun has started this process "
            f"as rank {world.rank} of {world.size}. Start all ranks with one "
            "`mpirun -n N python ...`, and give no other rank or size."
        )


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu", "cuda"])
register_debug(BACKEND_NAME, _make_group, ["cpu", "cuda"])
register_rendezvous_handler("mpi", _meet)  # type: ignore[no-untyped-call]
