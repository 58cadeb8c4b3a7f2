"""Is a checkpoint complete, and as it was written: by lengths, or by checksums once it is read."""

from typing import Any

from lightning_shard.checkpoint.conversion.source import Source, file_sizes
from lightning_shard.checkpoint.files.checksums import read_checksums
from lightning_shard.checkpoint.files.open_folder import INDEX_FILE
from lightning_shard.checkpoint.files.places import fresh_place, inside, remote_place
from lightning_shard.checkpoint.files.reading import verify_file
from lightning_shard.checkpoint.sharded.writing import verify_whole

_ARCHIVE = b"PK\x03\x04"


def verify(path: Any) -> bool:
    """Compare a checkpoint with the checksums that it has, and say whether it has any.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    filesystem, inner = fresh_place(path)
    if not filesystem.isdir(inner):
        return filesystem.isfile(inner) and _verify_file(path)
    if filesystem.isfile(inside(inner, INDEX_FILE)):
        return verify_whole(path)
    return False


def _verify_file(path: Any) -> bool:
    filesystem, inner = remote_place(path)
    with filesystem.open(inner, "rb") as file:
        if file.read(len(_ARCHIVE)) != _ARCHIVE:
            return False
    verify_file(path)
    return True


def missing_from(source: Source) -> list[str]:
    """Return as clauses what a checkpoint lacks, by the names and lengths of its files."""
    if source.folder is None:
        return []
    lengths = file_sizes(source.path)
    expected = dict(source.folder.parts)
    known = read_checksums(source.path, source.folder.edition) or {}
    expected |= {name: checksum["bytes"] for name, checksum in known.items()}
    return [
        f"{name} is missing, expected {expected[name]} bytes"
        if name not in lengths
        else f"{name} has {lengths[name]} bytes, expected {expected[name]}"
        for name in sorted(expected)
        if lengths.get(name, -1) < expected[name]
    ]
