"""Which processes a job has, and where they listen, as the system knows it."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"


@dataclass(frozen=True, order=True, kw_only=True)
class Listener:
    """A socket that listens.

    Attributes:
        address: Of the interface; "0.0.0.0" or "::" for all.
        process: Whose it is, the last words of its command line.
    """

    address: str
    port: int
    process: str

    @property
    def is_loopback(self) -> bool:
        return self.address in ("::1", "::ffff:127.0.0.1") or self.address.startswith("127.")

    @property
    def reached_at(self) -> tuple[str, int]:
        """Where it is reached from this host."""
        return ("::1" if self.address == "::1" else "127.0.0.1"), self.port


def processes_with(variable: str) -> list[int]:
    """Return the processes whose environment has this NAME=value."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # it has ended
                continue
            if variable.encode() in environment.split(b"\0"):
                found.append(int(folder.name))
    return found


def listeners_of(processes: list[int]) -> list[Listener]:
    """Return where these processes listen, TCP over IPv4 and IPv6."""
    found = set()
    for process in processes:
        try:
            inodes = _inodes(process)
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            table = [_listening(Path(f"/proc/{process}/net/{name}")) for name in ("tcp", "tcp6")]
        except OSError:  # it has ended
            continue
        name = b" ".join(words[:4])[-60:].decode(errors="replace")
        for address, port, inode in (one for of in table for one in of):
            if inode in inodes:
                found.add(Listener(address=address, port=port, process=name))
    return sorted(found)


def _inodes(process: int) -> set[str]:
    links = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except OSError:  # closed meanwhile
            continue
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def _listening(table: Path) -> list[tuple[str, int, str]]:
    if not table.exists():
        return []
    found = []
    for line in table.read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTENS:
            address, port = words[1].split(":")
            found.append((_address(address), int(port, 16), words[9]))
    return found


def _address(digits: str) -> str:
    """Return an address that the kernel tells as words of its own byte order."""
    raw = bytes.fromhex(digits)
    packed = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
