"""Why a checkpoint cannot be written: the operating system's reason, as an error with advice."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_shard.errors import CheckpointError

_ADVICE = {
    errno.ENOSPC: "Free space there, or save elsewhere (ModelCheckpoint(dirpath=...)); "
    "ModelCheckpoint(save_top_k=...) keeps fewer files.",
    errno.EDQUOT: "Free space of your quota, or save elsewhere (ModelCheckpoint(dirpath=...)).",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f, RLIMIT_FSIZE, or the filesystem's).",
    errno.EACCES: "Make the folder writable for this user, or save elsewhere.",
    errno.EPERM: "Make the folder writable for this user, or save elsewhere.",
    errno.EROFS: "Save on another filesystem (ModelCheckpoint(dirpath=...)).",
    errno.ENAMETOOLONG: "Give a shorter name (ModelCheckpoint(filename=...)).",
    errno.EEXIST: "Give a path whose parents are folders.",
    errno.ENOTDIR: "Give a path whose parents are folders.",
    errno.EIO: "The disk or its connection has failed; save elsewhere.",
}


def not_saved(path: Any, error: OSError) -> CheckpointError:
    """Return the error that says why nothing was saved under `path`."""
    reason = error.strerror or str(error) or type(error).__name__
    name = errno.errorcode.get(error.errno or 0)
    advice = _ADVICE.get(error.errno or 0, "Mend that, or save elsewhere.")
    return CheckpointError(
        f"{os.fspath(path)} was not saved: {reason}{f' ({name})' if name else ''}. What was there "
        f"before is as it was. {advice}"
    )


@contextmanager
def explaining_failures(path: Any) -> Iterator[None]:
    """Raise errors of the operating system as those of the checkpoint that is being saved.

    Raises:
        CheckpointError: The operating system has refused something inside.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise not_saved(path, error) from error
