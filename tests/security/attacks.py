"""What a stranger on this host or network may try at a port; bounded in number and time.

Everything goes to 127.0.0.1 or ::1.
"""

import contextlib
import pickle
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_shard.backends.authentication.connection import Connection, WrongTokenError, connect
from lightning_shard.backends.authentication.token import JobAddress

SECONDS = 0.5
HUGE = 1 << 20
Place = tuple[str, int]
_STORE_MAGIC = 0x3C85F7CE  # with which a client of torch's store begins
_SERVICES = ("store", "lifeline", "member")


class Mark:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


class Attacker:
    """Attacks places; a connection that it leaves half open stays so until `close`.

    Attributes:
        heard: What the attacked have answered, all of it.
        admitted: The attacks that were let in; there should be none.
    """

    def __init__(self, seed: int, mark: Path, transcripts: list[bytes]) -> None:
        self._random = random.Random(seed)
        self._mark = mark
        self._transcripts = transcripts
        self._open: list[socket.socket] = []
        self.heard = b""
        self.admitted: list[str] = []
        self.kinds: dict[str, Callable[[Place], None]] = {
            "garbage": lambda place: self._say(place, self._random.randbytes(512)),
            "garbage of lines": lambda place: self._say(place, b"\n" * 100_000),
            "HTTP": lambda place: self._say(place, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
            "half open": lambda place: self._say(place, b"", stays=True),
            "one byte": lambda place: self._say(place, b"{", stays=True),
            "huge length": lambda place: self._say(place, b"\xff" * 8 + b"\x7f" * 8, stays=True),
            "endless line": lambda place: self._say(place, b"7" * HUGE),
            "deep JSON": lambda place: self._say(place, b"[" * 1000 + b"\n"),
            "pickle": lambda place: self._say(place, pickle.dumps(Mark(self._mark))),
            "pickle of a rank": lambda place: self._say(
                place, b"\0" * 32 + b"p" + pickle.dumps(Mark(self._mark))
            ),
            "torch's store": self._ask_as_torch,
            "replayed handshake": self._replay,
            "empty proof": lambda place: self._say(
                place, b'{"nonce": "0", "service": "store", "proof": ""}\n'
            ),
            "own challenge": self._reflect,
            "wrong token": self._guess,
        }

    def attack(self, number: int, place: Place) -> str:
        """Make the attack of this number; return its name."""
        name = list(self.kinds)[number % len(self.kinds)]
        with contextlib.suppress(OSError):
            self.kinds[name](place)
        return name

    def flood(self, place: Place, num_connections: int) -> int:
        """Open so many connections and leave them open; return how many were accepted."""
        before = len(self._open)
        for _ in range(num_connections):
            with contextlib.suppress(OSError):
                self._open.append(socket.create_connection(place, timeout=SECONDS))
        return len(self._open) - before

    def close(self) -> None:
        for stream in self._open:
            stream.close()

    def _say(self, place: Place, words: bytes, *, stays: bool = False) -> None:
        stream = socket.create_connection(place, timeout=SECONDS)
        self._open.append(stream)
        stream.sendall(words)
        if not stays:
            self._listen(stream)
            stream.close()

    def _listen(self, stream: socket.socket) -> None:
        stream.settimeout(0.05)
        with contextlib.suppress(OSError):
            while heard := stream.recv(1 << 16):
                self.heard += heard

    def _ask_as_torch(self, place: Place) -> None:
        """Begin as torch's store does: validate, then set a key, and ask for it."""
        key = b"default_pg/0/attack"
        words = struct.pack("<BI", 0, _STORE_MAGIC)
        words += struct.pack("<BQ", 1, len(key)) + key + struct.pack("<Q", 1 << 60)
        self._say(place, words)

    def _replay(self, place: Place) -> None:
        for words in self._transcripts[:3]:
            self._say(place, words)

    def _reflect(self, place: Place) -> None:
        """Say the challenge to whoever has made it."""
        with socket.create_connection(place, timeout=SECONDS) as stream:
            stream.settimeout(0.2)
            challenge = stream.recv(1 << 12)
            self.heard += challenge
            stream.sendall(challenge)
            self._listen(stream)

    def _guess(self, place: Place) -> None:
        service = self._random.choice(_SERVICES)
        guess = f"{self._random.getrandbits(128):032x}"
        with contextlib.suppress(WrongTokenError):
            address = JobAddress(host=place[0], port=place[1], token=guess)
            let_in = connect(address, service, 0.2)
            self.admitted.append(f"{guess} at {place}")
            let_in.close()


def poison(place: Place, keys: list[str], mark: Path) -> dict[str, bytes]:
    """Read and overwrite a store that has no authentication; return what was read from it."""
    read: dict[str, bytes] = {}
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=1))
        for key in {*keys, *store.list_keys()}:
            if store.check([key]):
                read[key] = store.get(key)
            store.set(key, pickle.dumps(Mark(mark)).decode("latin-1"))
            store.delete_key(f"{key}/deleted")
    return read


@contextlib.contextmanager
def overheard(place: Place) -> Iterator[tuple[Place, list[bytes]]]:
    """Stand between a client and a door; yield where, and what clients have said."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    _pass_on(client, place, said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield ("127.0.0.1", listener.getsockname()[1]), said


def _pass_on(client: socket.socket, place: Place, said: list[bytes]) -> None:
    """Pass on a handshake: a challenge, an answer, a proof."""
    with client, socket.create_connection(place, timeout=SECONDS) as door:
        client.settimeout(SECONDS)
        client.sendall(door.recv(1 << 12))
        said.append(client.recv(1 << 12))
        door.sendall(said[-1])
        client.sendall(door.recv(1 << 12))


def challenges(place: Place) -> bool:
    """Whether who listens there is a door, which speaks first."""
    with socket.create_connection(place, timeout=SECONDS) as stream:
        stream.settimeout(SECONDS)
        with contextlib.suppress(OSError):
            return b"challenge" in stream.recv(1 << 12)
    return False


def overhear(place: Place, token: str) -> list[bytes]:
    """Return what one says who knows the token, once for each service that lets it in."""
    if not challenges(place):
        return []
    with overheard(place) as (between, said):
        for service in _SERVICES:
            with contextlib.suppress(OSError):
                address = JobAddress(host=between[0], port=between[1], token=token)
                let_in: Connection = connect(address, service, 1)
                let_in.close()
    return said
