"""Every way of training one model on many devices, as Lightning strategies.

Importing the package registers the strategy names: `Trainer(strategy="zero3")`.
"""

from lightning_shard.errors import (
    BackendUnavailableError,
    CheckpointError,
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    LayoutError,
    RankFailedError,
    ShardError,
)
from lightning_shard.mesh import ParallelMesh
from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
from lightning_shard.strategies.data_parallel import (
    DDPStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.strategies.elastic import ElasticStrategy
from lightning_shard.strategies.hybrid_parallel import HybridParallelStrategy
from lightning_shard.strategies.local_sgd import LocalSGDStrategy
from lightning_shard.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_shard.strategies.registry import register_strategies
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy

__all__ = [
    "AsyncSGDStrategy",
    "BackendUnavailableError",
    "CheckpointError",
    "CollectiveMismatchError",
    "ConfigError",
    "DDPStrategy",
    "DeadlockError",
    "ElasticStrategy",
    "HybridParallelStrategy",
    "LayoutError",
    "LocalSGDStrategy",
    "ParallelMesh",
    "PipelineParallelStrategy",
    "RankFailedError",
    "ShardError",
    "TensorParallelStrategy",
    "ZeRO1Strategy",
    "ZeRO2Strategy",
    "ZeRO3Strategy",
]

register_strategies()
