"""The job's token: the secret that its ranks have in common, and how each comes to know it.

what the user or our launcher has set    LIGHTNING_SHARD_JOB_TOKEN, or the file that
                                         LIGHTNING_SHARD_JOB_TOKEN_FILE names
all ranks on one host, nothing set       made from a key of this user on this host, and the port
several hosts, nothing set               none: anybody who reaches the port can take part
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from lightning_shard.core import settings
from lightning_shard.errors import ConfigError

_IN_MEMORY = Path("/dev/shm")
_KEY_BYTES = 32
_current: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where a job's server is, and the token that it asks for, which is left out in print."""

    host: str
    port: int
    token: str = field(repr=False)


def find_token(port: int, *, on_one_host: bool, rank: int) -> str:
    """Return the job's token, the same on every rank; rank 0 warns of a job that nothing guards."""
    if given := settings.job_token():
        return given
    if on_one_host:
        return hmac.digest(host_key(), f"port {port}".encode(), "sha256").hex()
    if rank == 0:
        warnings.warn(
            "The job runs on several hosts without a token: anybody who reaches its ports can take "
            "part. Set LIGHTNING_SHARD_JOB_TOKEN to the same secret on every host, for example of "
            "`openssl rand -hex 16`, or LIGHTNING_SHARD_JOB_TOKEN_FILE to a file that holds it.",
            stacklevel=2,
        )
    return hashlib.sha256(f"lightning-shard, no token, port {port}".encode()).hexdigest()


def remember(token: str | None) -> None:
    """Take this for the token of the job that this process takes part in."""
    global _current
    _current = token


def remembered() -> str | None:
    """Return the token of the job that this process takes part in; None without one."""
    return _current


def wrong_token(address: JobAddress, error: OSError) -> ConfigError:
    """Return the error of a rank whose token is not that of the job's server."""
    return ConfigError(
        f"What listens at {address.host}, port {address.port}, is not this rank's job: {error}. "
        "Set LIGHTNING_SHARD_JOB_TOKEN to the same value for every rank of the job, start all "
        "ranks as one user, and see that no other job has this port."
    )


def host_key(root: Path | None = None) -> bytes:
    """Return the key that this user has on this host; it is made when there is none."""
    if root is None:
        root = _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    folder = root / f"lightning_shard-key-{os.getuid()}"
    try:
        return _key_in(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} is to hold this user's key, got {error.strerror!r}, expected room for a few "
            f"bytes. Make room (df -h {root}), or set LIGHTNING_SHARD_JOB_TOKEN to the same secret "
            f"for every rank."
        ) from error


def make_private_folder(folder: Path, holds: str, instead: str) -> None:
    """Make a folder that nobody else may enter; the error says what it holds, and what to do."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is to hold {holds}, got {stat.filemode(found.st_mode)} of user "
            f"{found.st_uid}, expected a folder that user {os.getuid()} alone may enter. Remove "
            f"it, or {instead}."
        )


def _key_in(folder: Path) -> bytes:
    make_private_folder(folder, "this user's key", "set LIGHTNING_SHARD_JOB_TOKEN for every rank")
    key = folder / "key"
    if not key.exists():
        _make_key(key)
    return key.read_bytes()


def _make_key(path: Path) -> None:
    """Write a new key, whole or not at all; another rank's that is there already stays."""
    draft = path.with_name(f"draft-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
