"""The cluster environment of ranks that mpirun (or `srun --mpi=...`) has started.

    one host             what the launcher's variables say; MPI is not asked
    several hosts        MPI says which ranks share a host; hosts are numbered by their first rank
    no variables         MPI says everything; without an mpirun that is one rank of one

Lightning's own environment numbers hosts by the order of their names, checks nothing, and without
mpi4py is passed over, so that each rank trains alone.
"""

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_shard.backends.authentication.addresses import free_port
from lightning_shard.backends.mpi import runtime
from lightning_shard.core import settings
from lightning_shard.core.extras import installing
from lightning_shard.core.settings import LauncherVariables, ProcessRanks, Rendezvous
from lightning_shard.environments.checks import check_placement
from lightning_shard.environments.started_elsewhere import StartedElsewhere
from lightning_shard.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_LOOPBACK = "127.0.0.1"
# For messages, where no launcher has set variables.
COMM_WORLD = LauncherVariables(
    launcher="mpirun",
    rank="the rank in MPI.COMM_WORLD",
    world_size="the size of MPI.COMM_WORLD",
    local_rank="the rank among MPI's ranks of this host",
    local_size="the number of MPI's ranks on this host",
)


class MPIEnvironment(StartedElsewhere):
    """Answers from the launcher's variables and, where they do not tell enough, from MPI.

    Every rank must construct it, since asking MPI is collective.
    """

    def __init__(self) -> None:
        super().__init__()
        told = settings.mpi_variables()
        self._names = told or COMM_WORLD
        self._comm = _comm_world()
        self._placement = self._ask_mpi() if told is None else self._complete(told)

    @staticmethod
    @override
    def detect() -> bool:
        return settings.mpi_variables() is not None

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what mpirun has started with `Trainer(devices=..., num_nodes=...)`."""
        if self._names is COMM_WORLD and self.world_size() == 1 < num_devices * num_nodes:
            raise ConfigError(
                f"No mpirun has started this process ({COMM_WORLD.world_size} is 1), but "
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}). Start `mpirun -n "
                f"{num_devices * num_nodes} python ...` (under SLURM `srun --mpi=pmix`), or pass "
                "devices=1."
            )
        check_placement(self._names, self._placement, num_devices, num_nodes)

    def _complete(self, names: LauncherVariables) -> ProcessRanks:
        """Add the host's number to what the variables say."""
        told = settings.placement(names)
        if self._comm is not None:
            for name, value, of_mpi in (
                (names.world_size, told.world_size, self._comm.Get_size()),
                (names.rank, told.rank, self._comm.Get_rank()),
            ):
                if value != of_mpi:
                    raise ConfigError(
                        f"{name} is {value}, but mpi4py has {of_mpi} in its place: it uses another "
                        f"MPI than the {names.launcher} that started this process. Use the "
                        f"{names.launcher} of that MPI, or build mpi4py with this one."
                    )
        if told.local_size == told.world_size:
            return replace(told, node_rank=0, num_nodes=1)
        if self._comm is None:
            raise ConfigError(
                f"Rank {told.rank}: {names.world_size} is {told.world_size} and {names.local_size} "
                f"{told.local_size}, so there are several hosts; only MPI can tell which this is. "
                f"Install mpi4py: {installing('mpi4py')}."
            )
        asked = self._ask_mpi()
        return replace(told, node_rank=asked.node_rank, num_nodes=asked.num_nodes)

    def _ask_mpi(self) -> ProcessRanks:
        """Return this process's rank, host and world from MPI; every rank must call."""
        if self._comm is None:
            return ProcessRanks(
                rank=0, world_size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1
            )
        with runtime.lock:
            rank = self._comm.Get_rank()
            host = self._comm.Split_type(runtime.mpi().COMM_TYPE_SHARED)
            first_rank = host.bcast(rank)
            first_ranks = sorted(set(self._comm.allgather(first_rank)))
            asked = ProcessRanks(
                rank=rank,
                world_size=self._comm.Get_size(),
                local_rank=host.Get_rank(),
                local_size=host.Get_size(),
                node_rank=first_ranks.index(first_rank),
                num_nodes=len(first_ranks),
            )
            host.Free()
        return asked

    @cached_property
    @override
    def _rendezvous(self) -> Rendezvous:
        """Where the ranks meet; with MPI rank 0 says it, and the token; all raise its error."""
        if self._comm is None and self.world_size() > 1:
            try:
                return settings.rendezvous()
            except ConfigError as error:
                why = f"{error} Or install mpi4py, and rank 0 tells the others."
                raise ConfigError(why) from error
        if self._comm is None:
            return _own_rendezvous(_LOOPBACK)
        settings.set_job_token(runtime.job_token())
        return _common_rendezvous(runtime.host_of_rank_zero())


def _common_rendezvous(host: str) -> Rendezvous:
    """Return where rank 0 says that the ranks meet, or raise its error; every rank must call."""
    told: dict[str, Any] = {"host": "", "port": 0, "error": ""}
    try:
        own = _own_rendezvous(host)
        told |= {"host": own.host, "port": own.port}
    except ConfigError as error:
        told["error"] = str(error)
    told = runtime.from_rank_zero(told)
    if told["error"]:
        raise ConfigError(str(told["error"]))
    return Rendezvous(host=str(told["host"]), port=int(told["port"]))


def _own_rendezvous(host: str) -> Rendezvous:
    """Return where others can meet this process, reached at `host` unless the user says where."""
    host = settings.given("MASTER_ADDR") or host
    if settings.given("MASTER_PORT"):
        return Rendezvous(host=host, port=settings.master_port())
    return Rendezvous(host=host, port=free_port(_LOOPBACK if host == _LOOPBACK else ""))


def _comm_world() -> "Comm | None":
    """Return MPI's COMM_WORLD; None without mpi4py, or without the library that it loads."""
    if runtime.unavailable_reason() is not None:
        return None
    # Also of ranks that talk over Gloo: one that fails would wait for the others in MPI_Finalize.
    runtime.finalize_in_order(_nothing)
    comm: Comm = runtime.mpi().COMM_WORLD
    return comm


def _nothing() -> None:
    """Do nothing before MPI ends; the MPI backend, where it is in use, replaces this."""
