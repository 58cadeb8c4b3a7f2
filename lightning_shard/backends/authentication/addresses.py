"""Where a job listens: on this host alone if all of its ranks are here, else where peers come in.

all ranks on this host          127.0.0.1 or ::1
MASTER_ADDR is an address,      that address, or each of this host's own among those that the
or a name of this host          name stands for
it is a name of this host to    all addresses: nothing here tells by which one the peers come
others alone                    (a service's name in Kubernetes, Debian's 127.0.1.1)
"""

import contextlib
import socket
import struct
from pathlib import Path

from lightning_shard.core import settings

_BACKLOG = 1024
_PROBE_PORT = 9  # nothing is sent there
_SIOCGIFADDR = 0x8915


def loopback_of(host: str) -> str:
    """Return the loopback address by which ranks of one host meet that were told this host."""
    return host if settings.is_loopback(host) and host != "localhost" else "127.0.0.1"


def listen(host: str, port: int) -> list[socket.socket]:
    """Open sockets at one port (0: any free one) where peers connect that are to meet at `host`."""
    if settings.is_loopback(host):
        host = loopback_of(host)
    opened: list[socket.socket] = []
    for family, address in _own_addresses(host):
        told = opened[0].getsockname()[1] if opened else port
        with contextlib.suppress(OSError):
            opened.append(socket.create_server((address, told), family=family, backlog=_BACKLOG))
    if opened:
        return opened
    if settings.is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return [socket.create_server((host, port), family=family, backlog=_BACKLOG)]
    return [_on_all_addresses(port)]


def address_towards(host: str, port: int) -> str:
    """Return the address of this host from which it reaches another one; nothing is sent."""
    last: OSError | None = None
    found = socket.getaddrinfo(host, port or _PROBE_PORT, type=socket.SOCK_DGRAM)
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                last = error
    raise last or OSError(f"{host} has no address")


def free_port(host: str) -> int:
    """Return a port of an address of this host at which nobody listens now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def chosen_ports() -> str:
    """Return in words which ports the system chooses from, where nobody asks for one."""
    with contextlib.suppress(OSError, ValueError):
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return f"ports {first} to {last}"
    return "ports that the system chooses"


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None where it cannot be told."""
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError, ImportError):
                if _ipv4_of(probe, name) == address:
                    return name
    return None


def _ipv4_of(probe: socket.socket, interface: str) -> str:
    """Return an interface's IPv4 address; see netdevice(7)."""
    import fcntl  # not on Windows

    request = struct.pack("256s", interface.encode()[:15])
    return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _interface_of_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if digits == wanted:
                return name
    return None


def _own_addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return what a name stands for, but for a loopback address behind a name of this host."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    of_loopback = settings.is_loopback(host)
    own = [(family, str(address[0])) for family, _, _, _, address in found]
    return [one for one in dict.fromkeys(own) if of_loopback or not settings.is_loopback(one[1])]


def _on_all_addresses(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)
