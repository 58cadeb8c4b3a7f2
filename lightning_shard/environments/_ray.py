"""What this package asks of Ray Train, which need not be installed; and its private names.

Private names of Ray stand here; checked with Ray 2.60, `tests/ray` fails when they change.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_shard.core.extras import installing
from lightning_shard.errors import BackendUnavailableError, ConfigError


def ray_train() -> Any:
    """Return the module `ray.train`."""
    try:
        import_module("ray.train.collective")  # which the first version has not
    except ImportError as error:
        raise BackendUnavailableError(
            f"Ray Train cannot be used here: {error}. Install it, version 2.60 or newer: "
            f"{installing('ray')}."
        ) from error
    return sys.modules["ray.train"]


def is_worker() -> bool:
    """Whether Ray Train has started this process, and it runs a train function."""
    train: Any = sys.modules.get("ray.train")  # a worker has imported it
    if train is None:
        return False
    try:
        train.get_context()
    except (RuntimeError, AttributeError, DeprecationWarning):
        return False
    return "ray.train.v2" in sys.modules


def context() -> Any:
    """Return the context of this worker of Ray Train."""
    train = ray_train()
    if not is_worker():
        raise ConfigError(
            "This process is no worker of Ray Train, expected to be called in the function that a "
            "`ray.train.torch.TorchTrainer` runs on each of its workers. Move the call there."
        )
    return train.get_context()


def from_rank_zero(told: Any) -> Any:
    """Return what rank 0 tells, over Ray; each worker must call."""
    ray_train()
    return import_module("ray.train.collective").broadcast_from_rank_zero(told)


def fetched(checkpoint: Any) -> str:
    """Fetch a checkpoint of Ray's to this node and return its folder; each worker must call.

    Workers of a node share the folder, into which one that comes later writes anew.
    """
    folder = str(checkpoint.to_directory())
    import_module("ray.train.collective").barrier()
    return folder


def own_address() -> str:
    """Return the address of this worker's node, as Ray has it."""
    return str(import_module("ray.util").get_node_ip_address())


def run_id() -> str:
    """Return the name of the run, which all of its worker groups have in common."""
    inner = import_module("ray.train.v2._internal.execution.context")
    return str(inner.get_train_context().train_run_context.run_id)


def ray_torch() -> Any:
    """Return the module `ray.train.torch`."""
    return import_module("ray.train.torch")


def report(metrics: dict[str, Any]) -> None:
    """Report metrics alone; each worker must call."""
    ray_train().report(metrics)


def report_in_place(metrics: dict[str, Any], folder: Path) -> None:
    """Report a checkpoint that lies where Ray keeps them; each worker must call."""
    train = ray_train()
    train.report(
        metrics,
        checkpoint=train.Checkpoint(folder, train.get_context().get_storage().storage_filesystem),
        checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
    )


def report_copied(metrics: dict[str, Any], folder: Path | None, name: str) -> None:
    """Report a checkpoint that Ray copies into its storage first; each worker must call."""
    train = ray_train()
    checkpoint = None if folder is None else train.Checkpoint.from_directory(folder)
    train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)
