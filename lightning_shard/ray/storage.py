"""Where a run's checkpoints lie in Ray's storage.

    storage_path/name/                       the run's folder, which Ray keeps
        checkpoint_step=20-3f9a.../          what one report names; Ray removes it when others count
            checkpoint.ckpt                  a file, or a folder of `checkpoint_format="sharded"`

On filesystems that every node mounts the ranks write into the run's folder themselves. Into others
(S3, GCS) Ray copies what rank 0 has written.
"""

import os
from typing import Any

from lightning_shard.environments import _ray

CHECKPOINT_NAME = "checkpoint.ckpt"
"""Ray's own name for a checkpoint of Lightning in what it is told of."""

_MOUNTED = "local"  # pyarrow's name for every filesystem that the system knows, NFS too


def is_mounted(filesystem: Any) -> bool:
    """Whether a filesystem of pyarrow is one whose paths every process of the node can open."""
    return bool(filesystem.type_name == _MOUNTED)


def latest_checkpoint() -> str | None:
    """Return the path of what was reported last, for `trainer.fit(..., ckpt_path=...)`.

    In a worker group that was restarted it is what the one before has reported, or a run of the
    same name; it may have had another number of workers. A checkpoint in storage that the nodes do
    not mount is fetched first; each worker must call then.

    Returns:
        The path; None where nothing was reported.

    Raises:
        BackendUnavailableError: Ray Train is not installed.
        ConfigError: This process is no worker of Ray Train.
    """
    _ray.context()
    reported = _ray.ray_train().get_checkpoint()
    if reported is None:
        return None
    folder = reported.path if is_mounted(reported.filesystem) else _ray.fetched(reported)
    return os.path.join(folder, CHECKPOINT_NAME)
