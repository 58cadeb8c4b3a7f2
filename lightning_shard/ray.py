"""Ray Train: its workers are ranks of any strategy, its reports and restarts have our checkpoints.

RayEnvironment      which rank a worker is, and where the ranks meet
prepare_trainer     checks a Trainer in a train function, and gives it this worker's device
RayReportCallback   reports metrics and checkpoints to Ray
latest_checkpoint   what a restarted worker group goes on from
dataset_batches     this worker's batches of a Ray dataset; the ranks of one model get the same

Ray is imported when something of it is needed: `pip install 'lightning-shard[ray]'`.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.options import AtLeastZero, checked_options
from lightning_shard.environments import _ray
from lightning_shard.environments.ray import RayEnvironment
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy

__all__ = [
    "DatasetBatches",
    "RayEnvironment",
    "RayReportCallback",
    "dataset_batches",
    "latest_checkpoint",
    "prepare_trainer",
]


CHECKPOINT_NAME = "checkpoint.ckpt"
"""Ray's own name for a checkpoint of Lightning in what it is told of."""

_MOUNTED = "local"  # pyarrow's name for every filesystem that the system knows, NFS too


def is_mounted(filesystem: Any) -> bool:
    """Whether a filesystem of pyarrow is one whose paths every process of the node can open.

    storage_path/name/                       the run's folder, which Ray keeps
        checkpoint_step=20-3f9a.../          what one report names; Ray removes it when others count
            checkpoint.ckpt                  a file, or a folder of `checkpoint_format="sharded"`

    There the ranks write themselves; into others (S3, GCS) Ray copies what rank 0 has written.
    """
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


class RayReportCallback(Checkpoint):
    """Saves a checkpoint into Ray's storage and reports it with `trainer.callback_metrics`.

    All ranks report together, at the ends of epochs and, if asked, between steps. What Ray is told
    of is complete, also with `async_save`, which is waited for. How many are kept says
    `ray.train.CheckpointConfig(num_to_keep=...)`. Lightning adds no `ModelCheckpoint` beside it.

    Args:
        every_n_epochs: Epochs between two reports at the end of one; 0 for none there.
        every_n_train_steps: Optimizer steps between two reports in the middle of an epoch; 0 for
            none there.
        save: Whether a report has a checkpoint; without, lost workers begin anew.

    Raises:
        ConfigError: A number is below 0, or both are 0.
    """

    @checked_options
    def __init__(
        self,
        *,
        every_n_epochs: AtLeastZero = 1,
        every_n_train_steps: AtLeastZero = 0,
        save: bool = True,
    ) -> None:
        super().__init__()
        if not (every_n_epochs or every_n_train_steps):
            raise ConfigError(
                "RayReportCallback got every_n_epochs=0 and every_n_train_steps=0, expected one "
                "of them to be above 0."
            )
        self._every_n_epochs = every_n_epochs
        self._every_n_train_steps = every_n_train_steps
        self._saves = save
        self._last_step = 0  # behind which something was reported

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Refuse, before a fit, a form of checkpoints that Ray's storage cannot take."""
        if stage == "fit" and self._saves:
            _check_format(trainer)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Report nothing anew that a resumed fit begins with."""
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any
    ) -> None:
        """Report behind a step, if it is one to report behind."""
        step, every = trainer.global_step, self._every_n_train_steps
        if not every or step % every or step == self._last_step:
            return
        if not (trainer.is_last_batch and self._is_due_at_end(trainer)):
            self._report(trainer)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Report at the end of an epoch, if it is one to report at."""
        if self._is_due_at_end(trainer):
            self._report(trainer)

    def _is_due_at_end(self, trainer: "pl.Trainer") -> bool:
        every = self._every_n_epochs
        return bool(every) and (trainer.current_epoch + 1) % every == 0

    def _report(self, trainer: "pl.Trainer") -> None:
        """Save and report; each rank must call."""
        self._last_step = trainer.global_step
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        strategy: Any = trainer.strategy
        speaks = trainer.is_global_zero or not strategy.is_in_process  # for its worker
        if not self._saves:
            if speaks:
                _ray.report(metrics)
            return
        told = f"checkpoint_step={trainer.global_step}-{secrets.token_hex(8)}"
        name: str = strategy.broadcast(told)
        with _folder_to_save_into(name) as (folder, is_in_place):
            trainer.save_checkpoint(folder / CHECKPOINT_NAME)
            strategy.finish_save()
            if is_in_place and speaks:
                _ray.report_in_place(metrics, folder)
            elif speaks:
                _ray.report_copied(metrics, folder if trainer.is_global_zero else None, name)


@contextmanager
def _folder_to_save_into(name: str) -> Iterator[tuple[Path, bool]]:
    """Make the folder of a checkpoint; and say whether it lies where Ray keeps them."""
    storage = _ray.context().get_storage()
    if is_mounted(storage.storage_filesystem):
        yield Path(storage.experiment_fs_path, name), True
        return
    with tempfile.TemporaryDirectory() as own:
        yield Path(own), False


def _check_format(trainer: "pl.Trainer") -> None:
    strategy: Any = trainer.strategy
    filesystem = _ray.context().get_storage().storage_filesystem
    if strategy.checkpoint_format == "sharded" and not is_mounted(filesystem):
        raise ConfigError(
            f"checkpoint_format='sharded' lets each rank write into one folder, but Ray's storage "
            f"is {filesystem.type_name!r}, expected a filesystem that every node mounts. Give "
            f"RunConfig(storage_path=...) a path there, or use checkpoint_format='full'."
        )


def prepare_trainer(trainer: "pl.Trainer") -> "pl.Trainer":
    """Check a Trainer in the train function of a worker, and give it the worker's own device.

    It stands where `ray.train.lightning.prepare_trainer` does, which takes Ray's own strategies
    alone.

    Args:
        trainer: A Trainer with a strategy of this package: one of its names, or an object.

    Returns:
        The same Trainer.

    Raises:
        BackendUnavailableError: Ray Train is not installed.
        ConfigError: This process is no worker of Ray Train, or the Trainer's strategy, backend or
            cluster environment is none that its workers can be ranks of.
    """
    context = _ray.context()
    strategy: Any = trainer.strategy
    if not isinstance(strategy, DataParallelStrategy):
        raise ConfigError(
            f"prepare_trainer got a Trainer with {type(strategy).__name__}, expected a strategy of "
            f"lightning_shard. Pass strategy='zero3' for example; for Ray's own strategies call "
            f"ray.train.lightning.prepare_trainer."
        )
    if strategy.is_in_process and context.get_world_size() > 1:
        raise ConfigError(
            f"Ray Train started {context.get_world_size()} workers, and the backend 'in_process' "
            f"would train the whole model in each, apart from the others. Pass the strategy "
            f"without the suffix _in_process, or ScalingConfig(num_workers=1)."
        )
    environment = strategy.cluster_environment
    if not isinstance(environment, RayEnvironment) and not strategy.is_in_process:
        raise ConfigError(
            f"The Trainer's cluster environment is {type(environment).__name__}, expected "
            f"lightning_shard.ray.RayEnvironment. Leave the plugin out, and the Trainer finds it."
        )
    if isinstance(environment, RayEnvironment):
        strategy.num_nodes = environment.num_nodes
        if strategy.root_device.type == "cuda":  # of the node's GPUs that a worker sees, its own
            strategy.parallel_devices = [_ray.ray_torch().get_device()]
    return trainer


class DatasetBatches:
    """An iterable over the batches of one epoch after the other, for a Trainer's loaders.

    Args:
        strategy: The strategy of the Trainer, which knows the ranks of a model.
        shard: This worker's shard, a `ray.data.DataIterator`.
        options: Arguments of `DataIterator.iter_torch_batches`.
    """

    def __init__(self, strategy: DataParallelStrategy, shard: Any, options: dict[str, Any]) -> None:
        self._strategy = strategy
        self._shard = shard
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Read an epoch; every rank must."""
        batches = iter(self._shard.iter_torch_batches(**self._options))
        strategy = self._strategy
        group = strategy.run.groups.of_models.model if strategy.dimensions else None
        if group is None or group.size == 1:
            yield from batches
            return
        yield from _in_turns(batches, group)


def dataset_batches(trainer: "pl.Trainer", name: str, **options: Any) -> DatasetBatches:
    """Return this worker's batches of a dataset of the Ray trainer; each worker must call.

    Ranks of one model (tensor, pipeline and hybrid parallel) are given the same batches, and all
    of their shards between them. With `local_shuffle_buffer_size` give a `local_shuffle_seed`.

    Args:
        trainer: The Trainer that will read them.
        name: The dataset's key in `TorchTrainer(datasets=...)`.
        **options: Arguments of `ray.data.DataIterator.iter_torch_batches`: `batch_size`, the
            samples of one data-parallel rank's step, `drop_last`, `collate_fn` ...

    Raises:
        BackendUnavailableError: Ray Train is not installed.
        ConfigError: This process is no worker of Ray Train, it has no such dataset, or the
            strategy is not one of this package, or assigns the samples itself.
    """
    _ray.context()
    strategy: Any = trainer.strategy
    if not isinstance(strategy, DataParallelStrategy):
        raise ConfigError(
            f"dataset_batches got a Trainer with {type(strategy).__name__}, expected a strategy of "
            f"lightning_shard. For others use the shard itself: ray.train.get_dataset_shard."
        )
    if strategy.assigns_samples:
        raise ConfigError(
            "Elastic training assigns samples to ranks by their numbers, which a Ray dataset's "
            "stream has not. Give it a DataLoader over a dataset with a length, or use another "
            "strategy: under Ray each goes on from the last report with the workers there are."
        )
    try:
        shard = _ray.ray_train().get_dataset_shard(name)
    except Exception as error:
        raise ConfigError(
            f"There is no shard of the dataset {name!r} for this worker ({error}), expected a key "
            f"of TorchTrainer(datasets={{...}})."
        ) from error
    return DatasetBatches(strategy, shard, options)


def _in_turns(batches: Iterator[Any], group: Collectives) -> Iterator[Any]:
    """Give the ranks of one model the same batches, read from their shards in turns.

    shard of rank 0  reads     .         reads     .
    shard of rank 1  .         reads     .         reads      of the model of ranks 0 and 1

    Shards begin an epoch together, so each rank reads its first batch ahead.
    """
    ahead = list(islice(batches, 1))  # none at the end
    for turn in count():
        reader = turn % group.size
        read = group.broadcast_object(ahead, src=reader)
        if not read:
            return
        if reader == group.rank:
            ahead = list(islice(batches, 1))
        yield from read
