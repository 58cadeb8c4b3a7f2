"""The server that a thread of rank 0 keeps: the job's keys and values, and the hub of its ranks."""

import json
import socket
from collections.abc import Sequence

import torch.distributed as dist

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.authentication import store
from lightning_shard.backends.authentication.addresses import listen
from lightning_shard.backends.authentication.connection import serve_behind_door
from lightning_shard.backends.authentication.key_values import KeyValueService
from lightning_shard.backends.authentication.loop import Loop
from lightning_shard.backends.authentication.token import JobAddress
from lightning_shard.backends.liveness import server


class JobServer(Loop):
    """Serves a job until the process ends; on a thread that keeps rank 0's own lifeline, too."""

    def __init__(self, address: JobAddress) -> None:
        listeners = _listen(address)
        super().__init__("lightning-shard-job")
        self.asked_for = address
        self.port = int(listeners[0].getsockname()[1])
        selector = self.selector
        services = {
            store.SERVICE: KeyValueService(selector),
            server.SERVICE: server.HubService(selector),
        }
        serve_behind_door(self, listeners, address.token, services)


def _listen(address: JobAddress) -> Sequence[socket.socket]:
    try:
        return listen(address.host, address.port)
    except OSError as error:
        raise dist.DistNetworkError(
            f"Rank 0 cannot listen at {address.host}, port {address.port}: {error}"
        ) from error


ADDRESS_KEY = "lightning_shard/server"
"""Key under which rank 0 says where its server is, in a store that is there before."""


def tell_address(at: Store, address: JobAddress) -> None:
    """Say in a store where rank 0's server is."""
    at.set(ADDRESS_KEY, json.dumps([address.host, address.port]))


def told_address(at: Store, token: str) -> JobAddress:
    """Wait until rank 0 has said where its server is, and return that."""
    host, port = json.loads(at.get(ADDRESS_KEY))
    return JobAddress(host=str(host), port=int(port), token=token)


_server: JobServer | None = None


def current() -> JobServer | None:
    """Return the job's server where it is in this process; a forked child serves nobody."""
    return _server if _server is not None and _server.is_alive() else None


def serve(address: JobAddress) -> JobAddress:
    """Start the job's server in this process, which is rank 0's, unless it runs already."""
    global _server
    running = current()
    if running is None or running.asked_for != address or not address.port:
        end_service()
        _server = running = JobServer(address)
        running.start()
    return JobAddress(host=address.host, port=running.port, token=address.token)


def end_service() -> None:
    """End the job's server where it is in this process: all ranks have left what met there."""
    global _server
    running, _server = current(), None
    if running is not None:
        running.end()
