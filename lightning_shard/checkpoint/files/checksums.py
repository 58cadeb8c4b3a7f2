"""Checksums of the files of a folder, in a file beside them.

    checksums.json    {"format": 1, "files": {"__0_0.distcp": {"bytes": 123, "crc32": "0f1e2d3c"}}}

A folder of somebody else's may have none.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, TypedDict

from lightning_shard.checkpoint.files.open_folder import INDEX_FILE, OpenFolder, in_edition
from lightning_shard.checkpoint.files.places import inside, remote_place
from lightning_shard.errors import CheckpointError

CHECKSUMS = "checksums.json"
_FORMAT = 1
_CHUNK_BYTES = 1 << 18  # stays in the processor's cache between the copy and the sum


class Checksum(TypedDict):
    """Length of a file, and its CRC-32 in eight hexadecimal digits."""

    bytes: int
    crc32: str


def checksum_of(path: Any) -> Checksum:
    """Read a file, local or remote, and return its length and checksum."""
    filesystem, inner = remote_place(path)
    length, crc = 0, 0
    with filesystem.open(inner, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            length += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return {"bytes": length, "crc32": f"{crc:08x}"}


def write_checked(folder: OpenFolder, name: str, content: bytes | memoryview) -> Checksum:
    """Write a file of a folder that is not complete, and return its length and checksum."""
    with closing(folder.create(name)) as file:
        file.write(content)
        file.finish()
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def complete_folder(folder: OpenFolder, index: bytes, files: Mapping[str, Checksum]) -> None:
    """Write what makes a folder complete: its checksums, then its index."""
    last: Checksum = {"bytes": len(index), "crc32": f"{zlib.crc32(index):08x}"}
    told = {"format": _FORMAT, "files": {**files, INDEX_FILE: last}}
    write_checked(folder, folder.named(CHECKSUMS), json.dumps(told, indent=1).encode())
    folder.write_index(index)


def read_checksums(folder: Any, edition: str = "") -> dict[str, Checksum] | None:
    """Return the checksums of a folder's files; None where nobody has written any."""
    path = inside(folder, in_edition(CHECKSUMS, edition))
    filesystem, inner = remote_place(path)
    try:
        with filesystem.open(inner, "rb") as file:
            told = json.loads(file.read())
        number, files = told["format"], told["files"]
        known: dict[str, Checksum] = {
            str(name): {"bytes": int(one["bytes"]), "crc32": str(one["crc32"])}
            for name, one in files.items()
        }
    except FileNotFoundError as error:
        if not edition:
            return None
        raise CheckpointError(
            f"{path} is missing, expected the checksums of the folder's files. Copy the whole "
            f"folder, or load another checkpoint."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Expected the checksums of "
            f"the folder's files. Copy the whole folder, or load another checkpoint."
        ) from error
    if number != _FORMAT:
        raise CheckpointError(
            f"{path} has format {number!r}, expected {_FORMAT}: another version of lightning-shard "
            f"has written it. Install that version or a later one."
        )
    return known


def verify_folder(folder: Any, files: Iterable[str] | None = None, *, edition: str = "") -> None:
    """Check files of a folder against its checksums."""
    known = read_checksums(folder, edition)
    if known is None:
        return
    for name in known if files is None else files:
        if name in known:
            _verify(inside(folder, name), known[name])


def _verify(path: str, expected: Checksum) -> None:
    try:
        found = checksum_of(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing, expected a file of {expected['bytes']} bytes. Copy the whole "
            f"folder, or load another checkpoint."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. Load another checkpoint."
        ) from error
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: it has {found['bytes']} bytes with the checksum "
            f"{found['crc32']}, expected {expected['bytes']} bytes with {expected['crc32']}. Copy "
            f"it again from where it is whole, or load another checkpoint."
        )
