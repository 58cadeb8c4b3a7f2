"""A Trainer in a train function of Ray Train: what is checked and set before it runs."""

from typing import Any

import lightning.pytorch as pl

from lightning_shard.environments import RayEnvironment, _ray
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.base import ShardStrategy


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
