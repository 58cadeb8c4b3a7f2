"""A machine profile of this host, measured: what `lightning-shard plan --machine` reads.

    rank 0 .. N-1, at the same time     matrix products, copies
                                        all-gathers inside the host, messages of one element

As many ranks as a run would have measure at once, so that what they share (cores, memory, links) is
shared here, too. The slowest rank counts. Links to other hosts cannot be measured from one host:
they are what the adapters say, or what is given.
"""

import json
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from lightning_shard.backends.authentication.addresses import free_port
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import auto_backend, get_backend
from lightning_shard.backends.stopwatch import Stopwatch
from lightning_shard.core import settings
from lightning_shard.errors import ConfigError
from lightning_shard.planning.machine import MachineProfile
from lightning_shard.strategies.joining import destroy_groups
from lightning_shard.tools.doctor.communication import adapter_speed
from lightning_shard.tools.doctor.host import memory_bytes, num_cores

_TIMEOUT = timedelta(minutes=2)
_SECONDS = 0.4  # of each measurement
_REPEATS = 3
_SIZES = {"cpu": (768, 16 * 2**20), "cuda": (8192, 256 * 2**20)}  # matrices, bytes of a copy
_SMALL = {"cpu": (64, 2**16), "cuda": (256, 2**20)}


def measured_machine(
    *,
    num_ranks: int | None = None,
    backend: str = "auto",
    network: float | None = None,
    quick: bool = False,
) -> MachineProfile:
    """Measure this host with so many ranks at once; `quick` measures small tensors, too low."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = num_ranks or (torch.cuda.device_count() if device_type == "cuda" else 2)
    if ranks < 1 or (device_type == "cuda" and ranks > torch.cuda.device_count()):
        raise ConfigError(
            f"got {ranks} ranks to measure with, expected at least one, and not more than the "
            f"{torch.cuda.device_count()} GPUs of this host."
        )
    auto = auto_backend(torch.device(device_type), are_neighbours=ranks > 1)
    name = auto.name if backend == "auto" else backend
    if name in ("in_process", "mpi"):
        raise ConfigError(
            f"got the backend {name!r} to measure with, expected one whose ranks are processes "
            f"that can be started here: 'nccl', 'gloo' or 'shm'."
        )
    get_backend(name).check(torch.device(device_type))
    figures = _figures(ranks, name, device_type, quick=quick)
    return _profile(figures, ranks, name, device_type, network)


def _figures(ranks: int, name: str, device_type: str, *, quick: bool) -> dict[str, float]:
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        processes.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _measure, args=(ranks, name, device_type, port, str(path), quick), nprocs=ranks
        )
        found: dict[str, float] = json.loads(path.read_text())
        return found


def _profile(
    figures: dict[str, float], ranks: int, name: str, device_type: str, network: float | None
) -> MachineProfile:
    notes = [
        f"measured on {socket.gethostname()}, {time.strftime('%Y-%m-%d')}, {ranks} ranks at once"
    ]
    node = figures.get("node", figures["host"])
    notes.append(f"links by {name}" if ranks > 1 else "links not measured: those to host memory")
    if network is None:
        network, told = _network(node, ranks)
        notes.append(told)
    else:
        notes.append("network as given")
    is_gpu = device_type == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory if is_gpu else memory_bytes() // ranks
    threads = max(1, num_cores() // ranks)
    device = torch.cuda.get_device_name(0) if is_gpu else f"CPU, {threads} threads a rank"
    return MachineProfile(
        name=socket.gethostname(),
        source="; ".join(notes),
        device=device,
        devices_per_node=ranks,
        device_memory=memory,
        flops_16=figures["flops_16"],
        flops_32=figures["flops_32"],
        memory_bytes_per_second=figures["memory"],
        node_bytes_per_second=node,
        network_bytes_per_second=network,
        host_bytes_per_second=figures["host"],
        message_seconds=figures.get("message", 0.0),
    )


def _network(node: float, ranks: int) -> tuple[float, str]:
    found = adapter_speed()
    if found is None:
        return node, "network unknown: as inside the node, give --network"
    speed, adapters = found
    return speed / ranks, f"network not measured: the share of {adapters}"


def _measure(
    rank: int, ranks: int, name: str, device_type: str, port: int, path: str, quick: bool
) -> None:
    """Measure in one rank's process, and write what the slowest has."""
    settings.set_rendezvous("127.0.0.1", port)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, num_cores() // ranks))
    backend = get_backend(name)
    backend.init_process_group(rank=rank, world_size=ranks, device=device, timeout=_TIMEOUT)
    assert dist.group.WORLD is not None
    group = backend.collectives(dist.group.WORLD)
    own = _Figures(group, device).figures(*(_SMALL if quick else _SIZES)[device.type])
    everybody = group.all_gather_object(own)
    slowest = {
        key: (max if key == "message" else min)(one[key] for one in everybody) for key in own
    }
    if rank == 0:
        Path(path).write_text(json.dumps(slowest))
    group.barrier()
    destroy_groups()


class _Figures:
    """What a rank can do while all others do the same."""

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self._group, self._device = group, device
        self._watch = Stopwatch(group, device)

    def figures(self, width: int, num_bytes: int) -> dict[str, float]:
        """Return rates in operations and bytes a second, and the seconds of a message."""
        numel = num_bytes // 4
        found = {
            "flops_32": self._products(width, torch.float32),
            "flops_16": self._products(width, torch.bfloat16),
            "memory": self._copies(numel, self._device),
        }
        found["host"] = self._copies(numel, torch.device("cpu"))
        if self._group.size > 1:
            found |= {"node": self._gathers(numel), "message": self._messages()}
        return found

    def _products(self, width: int, dtype: torch.dtype) -> float:
        a, b = (torch.ones(width, width, device=self._device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * width**3 / self._seconds(lambda: torch.mm(a, b, out=out))

    def _copies(self, numel: int, source: torch.device) -> float:
        """Return bytes read and written in a device's memory, or sent from its host's."""
        pinned = self._device.type == "cuda" and source.type == "cpu"
        a = torch.ones(numel, device=source, pin_memory=pinned)
        b = torch.empty(numel, device=self._device)
        moved = 4 * numel if pinned else 8 * numel
        return moved / self._seconds(lambda: b.copy_(a, non_blocking=True))

    def _gathers(self, numel: int) -> float:
        size = self._group.size
        shard = torch.ones(numel // size, device=self._device)
        full = torch.empty(shard.numel() * size, device=self._device)
        group = self._group
        seconds = self._seconds(lambda: group.all_gather(full, shard).wait(), together=True)
        return (size - 1) * shard.numel() * 4 / seconds

    def _messages(self) -> float:
        one = torch.ones(1, device=self._device)

        def there_and_back() -> None:
            if self._group.rank == 0:
                self._group.send(one, 1).wait()
                self._group.recv(one, 1).wait()
            elif self._group.rank == 1:
                self._group.recv(one, 0).wait()
                self._group.send(one, 0).wait()

        return self._seconds(there_and_back, together=True) / 2

    def _seconds(self, action: Callable[[], Any], *, together: bool = False) -> float:
        """Return the least seconds of an action, after it has been done once to warm up."""
        once = self._watch.seconds(action, rounds=2)
        times = max(1, int(_SECONDS / _REPEATS / max(once, 1e-6)))
        if together:  # as often on each rank
            times = min(self._group.all_gather_object(times))
        return self._watch.seconds(action, rounds=_REPEATS, times=times)
