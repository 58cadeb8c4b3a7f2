"""The one module that reads the environment.

Launchers (torchrun, Lightning's own, SLURM's) tell a process by variables where its peers are. Each
function here reads what one caller needs and says which variable is missing or wrong.
"""

import os
import socket
from dataclasses import dataclass

from lightning_shard.errors import ConfigError

_LARGEST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a job meet: the address of rank 0's store."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether all ranks must be on this host."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def rendezvous() -> Rendezvous:
    """Read MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: One is missing, or the port is none.
    """
    host = _required("MASTER_ADDR", "the host of rank 0")
    port = _integer("MASTER_PORT", "a free port on the host of rank 0")
    if not 0 < port <= _LARGEST_PORT:
        raise ConfigError(f"MASTER_PORT is {port}; expected a port, 1 to {_LARGEST_PORT}.")
    return Rendezvous(host=host, port=port)


def rank_and_world_size() -> tuple[int, int]:
    """Read RANK and WORLD_SIZE.

    Raises:
        ConfigError: One is missing or no number, or the rank is not below the size.
    """
    rank = _integer("RANK", "this process's number")
    world_size = _integer("WORLD_SIZE", "the number of processes")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world_size}; expected 0 <= RANK < size.")
    return rank, world_size


def prefer_loopback_for_gloo() -> None:
    """Let Gloo bind to the loopback interface, unless the user has chosen one.

    By default Gloo looks up the host's own name, which fails or warns where that does not resolve
    (containers, laptops on the move). Set for the rest of the process: groups made later need it
    as well.
    """
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _required(name: str, meaning: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(
            f"The environment variable {name} is not set; expected {meaning}. Start the processes "
            "with a launcher that sets it (torchrun, Lightning's own), or set it for every rank."
        )
    return value


def _integer(name: str, meaning: str) -> int:
    value = _required(name, meaning)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"The environment variable {name} is {value!r}; expected {meaning}, a whole number."
        ) from None


def set_rendezvous(host: str, port: int) -> None:
    """Set MASTER_ADDR and MASTER_PORT for this process, as the cluster environment found them."""
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = str(port)
