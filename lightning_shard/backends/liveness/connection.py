"""Small messages over a socket that never blocks: one JSON object to a line."""

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 24


class Connection:
    """One end of a stream of messages.

    Attributes:
        is_open: False once the other end has closed, or said something that is no message.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.is_open = True

    def fileno(self) -> int:
        """Return the socket's file descriptor, which a selector asks for."""
        return self._stream.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether a part of what was sent still has to leave."""
        return self.is_open and bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Send now what the system takes, and the rest by later calls of `flush`."""
        self._outgoing += json.dumps(message).encode() + b"\n"
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
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # the latter of a thousand brackets
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):
            self.is_open = False
            return []
        return messages

    def _read(self) -> None:
        try:
            while chunk := self._stream.recv(_CHUNK_BYTES):
                self._incoming += chunk
                if len(self._incoming) > _LONGEST_LINE_BYTES:
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
