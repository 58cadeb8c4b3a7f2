"""What a train function of Ray Train asks for: a checked Trainer, and this worker's batches.

Ray cuts a dataset into one shard for each worker. Ranks of one model must be given the same
samples, and none may be left out: they take turns.

    batch            0         1         2         3
    shard of rank 0  reads     .         reads     .
    shard of rank 1  .         reads     .         reads      of the model of ranks 0 and 1
    given to both    the same batch, which the one that read it has sent

Shards begin an epoch together, so each rank reads its first batch ahead, before the first turn.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import lightning.pytorch as pl

from lightning_shard.backends.collectives import Collectives
from lightning_shard.environments import RayEnvironment, _ray
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.model_parallel import ModelParallelStrategy


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
    if not isinstance(strategy, ShardStrategy):
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
        _take_own_gpu(strategy)
    return trainer


def _take_own_gpu(strategy: ShardStrategy) -> None:
    """Have a worker compute on the GPU that Ray has given it, of those of the node that it sees."""
    if strategy.root_device.type == "cuda":
        strategy.parallel_devices = [_ray.ray_torch().get_device()]


class DatasetBatches:
    """An iterable over the batches of one epoch after the other, for a Trainer's loaders.

    Args:
        strategy: The strategy of the Trainer, which knows the ranks of a model.
        shard: This worker's shard, a `ray.data.DataIterator`.
        options: Arguments of `DataIterator.iter_torch_batches`.
    """

    def __init__(self, strategy: ShardStrategy, shard: Any, options: dict[str, Any]) -> None:
        self._strategy = strategy
        self._shard = shard
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Read an epoch; every rank must."""
        batches = iter(self._shard.iter_torch_batches(**self._options))
        group = _ranks_of_model(self._strategy)
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
    if not isinstance(strategy, ShardStrategy):
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


def _ranks_of_model(strategy: ShardStrategy) -> Collectives | None:
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.model_collectives
    return None


def _in_turns(batches: Iterator[Any], group: Collectives) -> Iterator[Any]:
    ahead = list(islice(batches, 1))  # none at the end
    for turn in count():
        reader = turn % group.size
        read = group.broadcast_object(ahead, src=reader)
        if not read:
            return
        if reader == group.rank:
            ahead = list(islice(batches, 1))
        yield from read
