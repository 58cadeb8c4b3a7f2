"""Authenticated connections: messages over sockets, between ends that know the job's token.

A message is one JSON object to a line, over a socket that never blocks. Once both ends have proved
that they know the token, which is never sent, each line begins with a code of the session:

    who connects                          who listens
                      <── nonce ────────────
    nonce, service, HMAC(token, ...) ──>        checked first: no other end is answered
                      <── HMAC(token, ...) ─    checked: a stranger's door is not trusted
    both: keys of this session = HMAC(token, ...), one for each direction

A proof holds both nonces and the names of end and service, so that none serves as another's. Who
has not proved itself is closed after ten seconds, a long line, or when there are too many: the one
that has waited longest, which comes again if it is a rank.

Source: mutual challenge-response with HMAC-SHA-256, RFC 2104; ISO/IEC 9798-4, mechanism 4.
"""

import contextlib
import hmac
import json
import logging
import secrets
import select
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from selectors import EVENT_READ, BaseSelector
from time import monotonic, sleep
from typing import Any

from typing_extensions import override

from lightning_shard.backends.authentication.loop import Loop, LoopPart
from lightning_shard.backends.authentication.token import JobAddress

_log = logging.getLogger(__name__)

Message = dict[str, Any]

_CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 24
_CODE_BYTES = 64  # of hexadecimal digits


class Connection:
    """One end of a stream of messages, whose socket belongs to it.

    Attributes:
        is_open: False once the other end has closed, or said something that is no message.
    """

    def __init__(self, stream: socket.socket, longest_line_bytes: int = LONGEST_LINE_BYTES) -> None:
        stream.setblocking(False)
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._longest_line_bytes = longest_line_bytes
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._keys: tuple[bytes, bytes] | None = None
        self._num_sent = self._num_received = 0
        self.is_open = True

    def seal(self, sending: bytes, receiving: bytes) -> None:
        """Have every message carry a code from now on, which needs one of these keys."""
        self._keys = sending, receiving
        self._longest_line_bytes = LONGEST_LINE_BYTES

    def fileno(self) -> int:
        """Return the socket's file descriptor, which a selector asks for."""
        return self._stream.fileno()

    @property
    def own_address(self) -> str:
        """The address of this end."""
        return str(self._stream.getsockname()[0])

    @property
    def has_unsent(self) -> bool:
        """Whether a part of what was sent still has to leave."""
        return self.is_open and bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Send now what the system takes, and the rest by later calls of `flush`."""
        if not self.is_open:
            return
        line = json.dumps(message).encode()
        if self._keys is not None:
            line = _code(self._keys[0], self._num_sent, line) + line
            self._num_sent += 1
        self._outgoing += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the system takes of the messages that have not left yet."""
        try:
            while self.has_unsent:
                del self._outgoing[: self._stream.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()  # what has come in may still be read

    def receive(self) -> list[Message]:
        """Return the messages that have come; at the end of the stream, close."""
        self._read()
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        try:
            messages = [json.loads(self._opened(line)) for line in lines]
        except (ValueError, RecursionError):  # the latter of a thousand brackets
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):
            self.is_open = False
            return []
        return messages

    def _opened(self, line: bytearray) -> bytes:
        """Return a line without its code."""
        if self._keys is None:
            return bytes(line)
        told, text = bytes(line[:_CODE_BYTES]), bytes(line[_CODE_BYTES:])
        if not hmac.compare_digest(told, _code(self._keys[1], self._num_received, text)):
            raise ValueError("the line's code is wrong")
        self._num_received += 1
        return text

    def _read(self) -> None:
        try:
            while chunk := self._stream.recv(min(_CHUNK_BYTES, self._longest_line_bytes)):
                self._incoming += chunk
                if len(self._incoming) > self._longest_line_bytes:
                    break
        except BlockingIOError:
            return
        except OSError:
            pass
        self.is_open = False

    def close(self) -> None:
        """Close the socket; what the system has taken still arrives."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._stream.close()


def _code(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256").hex().encode()


LONGEST_GREETING_BYTES = 1 << 10
"""No message of the two ends is longer before they know each other."""

_NONCE_BYTES = 32
_LONGEST_NONCE = 2 * _NONCE_BYTES


class WrongTokenError(ConnectionError):
    """The two ends of a connection do not know the same token."""


class Listening:
    """The part of the end that has listened, which speaks first."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_hex(_NONCE_BYTES)

    @property
    def challenge(self) -> Message:
        """The first message."""
        return {"kind": "challenge", "nonce": self._nonce}

    def answer(self, connection: Connection, message: Message) -> str | None:
        """Check the other end's proof, answer it and seal the connection."""
        nonce, service = message.get("nonce"), message.get("service")
        if not isinstance(nonce, str) or not _is_nonce(nonce) or not isinstance(service, str):
            return None
        place = (service, self._nonce, nonce)
        if not _is_proof(message.get("proof"), self._token, "connecting", *place):
            connection.send({"kind": "refused"})
            return None
        connection.send({"kind": "proof", "proof": _proof(self._token, "listening", *place)})
        connection.seal(*_keys(self._token, *place)[::-1])
        return service


class Connecting:
    """The part of the end that has connected."""

    def __init__(self, token: str, service: str) -> None:
        self._token = token
        self._service = service
        self._place: tuple[str, str, str] | None = None

    def take(self, connection: Connection, message: Message) -> bool:
        """Take the next message of the other end; return whether the connection is sealed."""
        if self._place is None:
            theirs, own = message.get("nonce"), secrets.token_hex(_NONCE_BYTES)
            if not isinstance(theirs, str) or not _is_nonce(theirs):
                raise WrongTokenError("it speaks another protocol")
            self._place = (self._service, theirs, own)
            proof = _proof(self._token, "connecting", *self._place)
            connection.send({"nonce": own, "service": self._service, "proof": proof})
            return False
        if not _is_proof(message.get("proof"), self._token, "listening", *self._place):
            raise WrongTokenError("it does not know this token")
        connection.seal(*_keys(self._token, *self._place))
        return True


def _is_nonce(told: str) -> bool:
    return 0 < len(told) <= _LONGEST_NONCE and told.isascii()


def _is_proof(told: object, token: str, *place: str) -> bool:
    return isinstance(told, str) and hmac.compare_digest(
        told.encode(errors="replace"), _proof(token, *place).encode()
    )


def _proof(token: str, *place: str) -> str:
    return _digest(token, *place).hex()


def _keys(token: str, *place: str) -> tuple[bytes, bytes]:
    """Return the keys of what the connecting end says, and of what it hears."""
    return _digest(token, "said", *place), _digest(token, "heard", *place)


def _digest(token: str, *place: str) -> bytes:
    told = "\0".join(("lightning-shard", *place)).encode(errors="replace")
    return hmac.digest(token.encode(), told, "sha256")


PATIENCE_SECONDS = 10.0
MOST_STRANGERS = 128
_MOST_AT_ONCE = 64


class Door(LoopPart):
    """Accepts connections, and hands on the admitted ones to the service that they come for."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        selector: BaseSelector,
        services: "Mapping[str, Served]",
    ) -> None:
        self._listeners = listeners
        self._token = token
        self._selector = selector
        self._services = services
        self._strangers: dict[Connection, tuple[Listening, float]] = {}  # in order of their coming
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, EVENT_READ, partial(self._accept, listener))

    @override
    def tick(self, now: float, seconds: float) -> None:
        """Close the strangers that have waited for too long."""
        for connection, (_, since) in list(self._strangers.items()):
            if now - since <= PATIENCE_SECONDS:
                return
            self._turn_away(connection)

    @override
    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in self._strangers:
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                stream, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # gone before it was greeted, or no descriptor is left
                self._make_room(len(self._strangers) // 2)
                return
            self._make_room(MOST_STRANGERS - 1)
            self._greet(stream)

    def _greet(self, stream: socket.socket) -> None:
        connection = Connection(stream, LONGEST_GREETING_BYTES)
        handshake = Listening(self._token)
        self._strangers[connection] = handshake, monotonic()
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))
        connection.send(handshake.challenge)

    def _make_room(self, num_stay: int) -> None:
        for connection in list(self._strangers)[: max(0, len(self._strangers) - num_stay)]:
            self._turn_away(connection)

    def _read(self, connection: Connection) -> None:
        if connection not in self._strangers:  # turned away by an event of the same moment
            return
        messages = connection.receive()
        if messages and connection.is_open:
            handshake, _ = self._strangers[connection]
            service = handshake.answer(connection, messages[0])
            if service is not None and service in self._services and len(messages) == 1:
                self._forget(connection)
                self._services[service].admit(connection)
                return
        if messages or not connection.is_open:
            self._turn_away(connection)

    def _turn_away(self, connection: Connection) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: Connection) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)


class Served(LoopPart):
    """The connections that one thread's selector serves, whose owners tell who they are."""

    def __init__(self, selector: BaseSelector) -> None:
        self._selector = selector
        self._owners: dict[Connection, Any] = {}  # in the order of their coming; None: not told
        self._connections: dict[Any, Connection] = {}  # by owner

    @abstractmethod
    def _take(self, connection: Connection, message: Message) -> bool:
        """Take a message; return whether it may come, else the connection is closed."""

    @abstractmethod
    def _lost(self, connection: Connection, owner: Any) -> None:
        """Hear of a connection that is closed; its owner is None where it has told of none."""

    @override
    def flush(self) -> bool:
        for connection in self._owners:
            connection.flush()
        return any(connection.has_unsent for connection in self._owners)

    def admit(self, connection: Connection) -> None:
        """Serve a connection from now on."""
        self._owners[connection] = None
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))

    def _know(self, connection: Connection, owner: Any) -> None:
        self._connections.pop(self._owners[connection], None)
        self._owners[connection], self._connections[owner] = owner, connection

    def _tell(self, owner: Any, message: Message) -> None:
        if owner in self._connections:
            self._connections[owner].send(message)

    def _read(self, connection: Connection) -> None:
        if connection not in self._owners:  # closed by an event of the same moment
            return
        for message in connection.receive():
            try:
                is_fit = self._take(connection, message)
            except (KeyError, TypeError, ValueError):  # no rank says so
                _log.warning("A connection is closed, whose message does not fit", exc_info=True)
                is_fit = False
            if not is_fit:
                connection.is_open = False
                break
        if not connection.is_open:
            owner = self._owners.pop(connection)
            self._connections.pop(owner, None)
            self._selector.unregister(connection)
            connection.close()
            self._lost(connection, owner)

    @override
    def close(self) -> None:
        for connection in self._owners:
            connection.close()


def serve_behind_door(
    loop: Loop, listeners: Sequence[socket.socket], token: str, services: Mapping[str, Served]
) -> None:
    """Have a loop serve these services to those who come in and know the token."""
    loop.add(Door(listeners, token, loop.selector, services), *services.values())


_RETRY_SECONDS = 0.05
_LONGEST_TRY_SECONDS = 5.0


def connect(
    address: JobAddress,
    service: str,
    patience_seconds: float,
    between_tries: Callable[[], object] = lambda: None,
) -> Connection:
    """Connect with a door, and wait for it if it is still to come; return a sealed connection.

    `between_tries` is called before each further try, and raises if none has a chance.

    Raises:
        WrongTokenError: Somebody listens there who does not know this token.
        OSError: Nobody has answered in time; the last error of the system.
    """
    deadline = monotonic() + patience_seconds
    while True:
        last: OSError | None = None
        for stream in _streams(address.host, address.port, deadline):
            if isinstance(stream, OSError):
                last = last or stream
                continue
            connection = Connection(stream, LONGEST_GREETING_BYTES)
            try:
                _shake_hands(connection, Connecting(address.token, service), deadline)
                return connection
            except OSError as error:
                connection.close()
                if isinstance(error, WrongTokenError):
                    raise
                last = error
        if monotonic() + _RETRY_SECONDS > deadline:
            raise last or TimeoutError(f"nobody answers at {address.host}, port {address.port}")
        sleep(_RETRY_SECONDS)
        between_tries()


def ask(connection: Connection, message: Message, seconds: float) -> Message:
    """Send a message through a sealed connection, and wait for the one that answers it."""
    deadline = monotonic() + seconds
    connection.send(message)
    return next(_messages(connection, deadline))


def _streams(host: str, port: int, deadline: float) -> Iterator[socket.socket | OSError]:
    """Try each address; yield a stream, or the error of one that does not answer."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:  # a name that is still to be known (containers)
        yield error
        return
    for family, kind, protocol, _, address in found:
        seconds = min(deadline - monotonic(), _LONGEST_TRY_SECONDS)
        if seconds <= 0:
            return
        stream = socket.socket(family, kind, protocol)
        stream.settimeout(seconds)
        try:
            stream.connect(address)
        except OSError as error:
            stream.close()
            yield error
            continue
        yield stream


def _shake_hands(connection: Connection, handshake: Connecting, deadline: float) -> None:
    until = min(deadline, monotonic() + _LONGEST_TRY_SECONDS)
    for message in _messages(connection, until):
        if message.get("kind") == "refused":
            raise WrongTokenError("it refuses this token")
        if handshake.take(connection, message):
            return


def _messages(connection: Connection, deadline: float) -> Iterator[Message]:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while connection.is_open:
        seconds = deadline - monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out: no answer came")
        if connection.has_unsent:
            connection.flush()
            seconds = min(seconds, _RETRY_SECONDS)
        if poll.poll(1000 * seconds):
            yield from connection.receive()
    raise ConnectionResetError("connection closed by peer")
