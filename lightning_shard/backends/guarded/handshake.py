"""How two ends of a connection prove to each other that they know the job's token.

    who connects                          who listens
                  <── nonce ────────────
    nonce, service, HMAC(token, ...) ──>        checked first: no other end is answered
                  <── HMAC(token, ...) ─        checked: a stranger's door is not trusted
    both: keys of this session = HMAC(token, ...), one for each direction

The token itself is never sent. A proof holds both nonces, so that what was overheard is of no use
later, and the names of the end and the service, so that none serves as another's.

Source: mutual challenge-response with HMAC-SHA-256, RFC 2104; ISO/IEC 9798-4, mechanism 4.
"""

import hmac
import secrets

from lightning_shard.backends.guarded.connection import Connection, Message

LONGEST_LINE_BYTES = 1 << 10
"""No message of the two ends is longer before they know each other."""

_NONCE_BYTES = 32
_LONGEST_NONCE = 2 * _NONCE_BYTES


class WrongTokenError(ConnectionError):
    """The two ends of a connection do not know the same token."""


class Listening:
    """The part of the end that has listened, which speaks first.

    Args:
        token: The job's token.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_hex(_NONCE_BYTES)

    @property
    def challenge(self) -> Message:
        """The first message."""
        return {"kind": "challenge", "nonce": self._nonce}

    def answer(self, connection: Connection, message: Message) -> str | None:
        """Check the other end's proof, answer it and seal the connection.

        Returns:
            The service that the other end asks for; None when it has proved nothing.
        """
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
    """The part of the end that has connected.

    Args:
        token: The job's token.
        service: What it has come for.
    """

    def __init__(self, token: str, service: str) -> None:
        self._token = token
        self._service = service
        self._place: tuple[str, str, str] | None = None

    def take(self, connection: Connection, message: Message) -> bool:
        """Take the next message of the other end; return whether the connection is sealed.

        Raises:
            WrongTokenError: The other end does not know this token.
        """
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
