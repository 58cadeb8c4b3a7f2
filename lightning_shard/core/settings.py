"""The one module that reads what launchers and users set in the environment.

Launchers tell a process by variables where it is and where its peers are, each by its own names:

                   rank                  world size            local rank ...
    torchrun       RANK                  WORLD_SIZE            LOCAL_RANK
    srun           SLURM_PROCID          SLURM_NTASKS          SLURM_LOCALID
    mpirun         OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK

Each function reads what one caller needs and says which variable is missing or wrong.
"""

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_shard.errors import ConfigError

_LARGEST_PORT = 65535
_JOB = "LIGHTNING_SHARD_JOB"
_JOB_TOKEN = "LIGHTNING_SHARD_JOB_TOKEN"
_JOB_TOKEN_FILE = "LIGHTNING_SHARD_JOB_TOKEN_FILE"
_SHORTEST_TOKEN = 16
_JOB_IS_INITIAL = "LIGHTNING_SHARD_JOB_IS_INITIAL"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address, of rank 0's host, at which the ranks of a job meet."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """The address of an elastic job's rendezvous server, and its token; "" for none."""

    host: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class LauncherVariables:
    """The environment variables by which a launcher tells a process its rank and host.

    Attributes:
        launcher: Command that the user types.
        node_rank: Variable with the host's number; None when the launcher sets none.
        num_nodes: Variable with the number of hosts; None when the launcher sets none.
        start: Command that starts "{}" processes on each host, for error messages.
        start_on_nodes: Command that starts processes on "{}" hosts, for error messages.
        optional: Variables that the launcher leaves out at times.
    """

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    node_rank: str | None = None
    num_nodes: str | None = None
    start: str = "mpirun -n {} python ..."
    start_on_nodes: str = "mpirun on {} host(s)"
    optional: frozenset[str] = frozenset()


TORCHRUN = LauncherVariables(
    launcher="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    num_nodes="GROUP_WORLD_SIZE",
    start="torchrun --nproc-per-node {} ...",
    start_on_nodes="torchrun --nnodes {} ...",
)
# https://slurm.schedmd.com/srun.html, "output environment variables"
SLURM = LauncherVariables(
    launcher="srun",
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_NTASKS_PER_NODE",
    node_rank="SLURM_NODEID",
    num_nodes="SLURM_NNODES",
    start="srun --ntasks-per-node={} python ...",
    start_on_nodes="srun --nodes={} ...",
    optional=frozenset({"SLURM_NTASKS_PER_NODE"}),
)
# https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html: its NODE_RANK is a rank
# among the processes of this node, not the node's number.
OPEN_MPI = LauncherVariables(
    launcher="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = LauncherVariables(  # MPICH and Intel MPI
    launcher="mpirun",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)
CRAY_PMI = LauncherVariables(
    launcher="mpiexec",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="PMI_LOCAL_RANK",
    local_size="PMI_LOCAL_SIZE",
    start="mpiexec -n {} python ...",
    start_on_nodes="mpiexec on {} host(s)",
)


@dataclass(frozen=True, kw_only=True)
class ProcessRanks:
    """A process's ranks and the sizes of its groups; None where the launcher did not tell."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None


def mpi_variables() -> LauncherVariables | None:
    """Return the names of the MPI launcher that has started this process, if one has.

    srun can set PMI_RANK as well; only an MPI launcher sets a local rank beside it.
    """
    if given(OPEN_MPI.rank) or given(OPEN_MPI.local_rank):
        return OPEN_MPI
    for names in (HYDRA, CRAY_PMI):
        if given(names.rank) and given(names.local_rank):
            return names
    return None


def is_under_mpi() -> bool:
    """Whether a launcher that speaks to MPI (mpirun, srun --mpi=...) has started this process."""
    return any(name.startswith(("OMPI_", "PMI_", "PMIX_", "MPI_", "I_MPI_")) for name in os.environ)


def placement(names: LauncherVariables) -> ProcessRanks:
    """Read this process's ranks and the sizes of its groups."""
    rank, world_size = _number_below(names.rank, names.world_size, names)
    local_size = node_rank = num_nodes = None
    if given(names.local_size) or names.local_size not in names.optional:
        local_rank, local_size = _number_below(names.local_rank, names.local_size, names)
    else:
        local_rank = integer(names.local_rank, _as_set_by(names))
    if names.node_rank is not None and names.num_nodes is not None:
        node_rank, num_nodes = _number_below(names.node_rank, names.num_nodes, names)
    return ProcessRanks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
    )


def check_numbers(names: LauncherVariables) -> None:
    """Refuse a launcher's variable that is set and no whole number."""
    told = (names.rank, names.world_size, names.local_rank, names.local_size)
    for name in (*told, names.node_rank, names.num_nodes):
        if name is not None and given(name):
            integer(name, _as_set_by(names))


def rendezvous() -> Rendezvous:
    """Read MASTER_ADDR and MASTER_PORT."""
    return Rendezvous(host=required("MASTER_ADDR", "the host of rank 0"), port=master_port())


def master_port() -> int:
    """Read MASTER_PORT."""
    port = integer("MASTER_PORT", "a free port on the host of rank 0")
    if not 0 < port <= _LARGEST_PORT:
        raise ConfigError(f"MASTER_PORT is {port}; expected a port, 1 to {_LARGEST_PORT}.")
    return port


def is_loopback(host: str) -> bool:
    """Whether this name or address is reached from the host itself only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def job() -> Job | None:
    """Read LIGHTNING_SHARD_JOB and the job's token: the elastic job to take part in."""
    if not given(_JOB):
        return None
    address = required(_JOB, "an elastic job's address, host:port, as its first process prints it")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LARGEST_PORT:
        raise ConfigError(
            f"The environment variable {_JOB} is {address!r}; expected host:port, as the job's "
            "first process prints it."
        )
    return Job(host=host.strip("[]"), port=int(port), token=job_token())


def job_token() -> str:
    """Read LIGHTNING_SHARD_JOB_TOKEN, or the file that LIGHTNING_SHARD_JOB_TOKEN_FILE names."""
    token, source = given(_JOB_TOKEN), f"The environment variable {_JOB_TOKEN}"
    if not token and given(_JOB_TOKEN_FILE):
        token, source = _token_in_file(Path(given(_JOB_TOKEN_FILE)))
    if token and len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"{source} holds {len(token)} characters; expected a secret of {_SHORTEST_TOKEN} or "
            "more, for example of `openssl rand -hex 16`."
        )
    return token


def set_job_token(token: str) -> None:
    """Have this process, and those that it starts, know the job's token."""
    os.environ[_JOB_TOKEN] = token


def _token_in_file(path: Path) -> tuple[str, str]:
    source = f"The file {path} of {_JOB_TOKEN_FILE}"
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {error}.") from error
    if mode & 0o077:
        raise ConfigError(
            f"{source} is {stat.filemode(mode)}; expected one that its user alone may read: "
            f"`chmod 600 {path}`."
        )
    if not token:
        raise ConfigError(f"{source} is empty; expected the job's token.")
    return token, source


def is_on_one_host() -> bool:
    """Whether all ranks are on this host, as rank 0's address or the launcher's variables tell."""
    if is_loopback(given("MASTER_ADDR")):
        return True
    mpi = mpi_variables()
    if mpi is not None:
        return given(mpi.local_size) == given(mpi.world_size) != ""
    if given("TORCHELASTIC_RUN_ID"):
        return given(TORCHRUN.local_size) == given(TORCHRUN.world_size) != ""
    return given(SLURM.num_nodes or "") == "1" and given(SLURM.rank) != ""


def job_variables(job: Job) -> dict[str, str]:
    """Return the environment variables that a newcomer of this job needs, but for the token."""
    host = f"[{job.host}]" if ":" in job.host else job.host
    return {_JOB: f"{host}:{job.port}"}


def set_job(job: Job) -> None:
    """Make this process, and those that it starts, initial ranks of an elastic job."""
    os.environ.update({**job_variables(job), _JOB_TOKEN: job.token, _JOB_IS_INITIAL: "1"})


def joins_job() -> bool:
    """Whether the environment says that this process joins a running elastic job."""
    return job() is not None and given(_JOB_IS_INITIAL) != "1"


def prefer_loopback_for_gloo() -> None:
    """Let Gloo bind to the loopback interface, unless the user has chosen one.

    By default Gloo looks up the host's own name, which fails or warns where that does not resolve
    (containers, laptops on the move). The setting stays for the rest of the process: groups made
    later need it as well.
    """
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        prefer_interface_for_gloo(loopback[0])


def prefer_interface_for_gloo(interface: str) -> None:
    """Let Gloo bind to this interface, unless the user has chosen one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def debug() -> bool:
    """Read LIGHTNING_SHARD_DEBUG: whether ranks compare every call before they make it."""
    value = given("LIGHTNING_SHARD_DEBUG")
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"The environment variable LIGHTNING_SHARD_DEBUG is {value!r}; expected 1, for ranks "
            "that compare every collective call before they make it, or 0."
        )
    return value == "1"


def grace_seconds() -> float:
    """Read LIGHTNING_SHARD_GRACE_SECONDS: how long a SIGTERM waits for the ranks' next step.

    Thirty seconds by default, which is what SLURM and torchrun wait before they kill.
    """
    value = given("LIGHTNING_SHARD_GRACE_SECONDS") or "30"
    with suppress(ValueError):
        if (seconds := float(value)) > 0:
            return seconds
    raise ConfigError(
        f"The environment variable LIGHTNING_SHARD_GRACE_SECONDS is {value!r}; expected a number "
        "above 0: the seconds after SIGTERM in which every rank comes to its next step."
    )


def torchrun_job() -> str | None:
    """Return a name that torchrun's workers on this host share over restarts; None without it.

    It has the process id of the agent, the workers' parent, which stays.
    """
    run = given("TORCHELASTIC_RUN_ID")
    return f"{run}-{os.getppid()}" if run else None


def has_agent_store() -> bool:
    """Whether torchrun's agent keeps a store at MASTER_ADDR and MASTER_PORT."""
    return given("TORCHELASTIC_USE_AGENT_STORE") == "True"


def global_seed() -> int:
    """Read PL_GLOBAL_SEED, which `seed_everything` has set; 0 without it, as in Lightning."""
    name = "PL_GLOBAL_SEED"
    return integer(name, "a seed, as seed_everything sets it") if given(name) else 0


def set_rendezvous(host: str, port: int) -> None:
    """Set MASTER_ADDR and MASTER_PORT for this process, as the cluster environment found them."""
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = str(port)


def given(name: str) -> str:
    """Return the variable's value, or "" when it is not set."""
    return os.environ.get(name, "")


def required(name: str, meaning: str) -> str:
    """Return the value of a variable that must be set."""
    value = given(name)
    if not value:
        raise ConfigError(
            f"The environment variable {name} is not set; expected {meaning}. Start the processes "
            "with a launcher that sets it (torchrun, srun, mpirun, Lightning's own), or set it for "
            "every rank."
        )
    return value


def integer(name: str, meaning: str) -> int:
    """Return the value of a variable that must be set, as a whole number."""
    value = required(name, meaning)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"The environment variable {name} is {value!r}; expected {meaning}, a whole number."
        ) from None


def _as_set_by(names: LauncherVariables) -> str:
    return f"a number, as {names.launcher} sets it"


def _number_below(number: str, size: str, names: LauncherVariables) -> tuple[int, int]:
    meaning = _as_set_by(names)
    value, limit = integer(number, meaning), integer(size, meaning)
    if not 0 <= value < limit:
        raise ConfigError(
            f"{number} is {value} and {size} is {limit}; expected 0 <= {number} < {size}."
        )
    return value, limit
