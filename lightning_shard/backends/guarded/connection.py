"""Small messages over a socket that never blocks: one JSON object to a line.

open      {"kind": "beat"}                  until the ends have proved that they know the token
sealed    3f9c...e1 {"kind": "beat"}        a code of the session, the line's number and the line
"""

import contextlib
import hmac
import json
import socket
from typing import Any

Message = dict[str, Any]

_CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 24
_CODE_BYTES = 64  # of hexadecimal digits


class Connection:
    """One end of a stream of messages.

    Args:
        stream: The socket, which belongs to the connection from now on.
        longest_line_bytes: A longer line is no message; it is refused before it is kept.

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
        """Have every message carry a code from now on, which needs one of these keys.

        Args:
            sending: The key of what this end says.
            receiving: The key of what the other end says; a line without its code closes.
        """
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
        """Return a line without its code.

        Raises:
            ValueError: It is not the next line of who knows the key.
        """
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
