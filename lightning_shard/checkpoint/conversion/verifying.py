"""Is a checkpoint complete, and as it was written: by lengths, or by checksums once it is read."""

from typing import Any

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
