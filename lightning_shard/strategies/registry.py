"""The strategy names: each scheme alone and with each backend as a suffix."""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.backends.registry import backend_names
from lightning_shard.data_parallel.compression import COMPRESSORS
from lightning_shard.strategies._lightning import accept_compiled_modules
from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.data_parallel import (
    DataParallelStrategy,
    DDPStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.strategies.elastic import ElasticStrategy
from lightning_shard.strategies.hybrid_parallel import HybridParallelStrategy
from lightning_shard.strategies.local_sgd import LocalSGDStrategy
from lightning_shard.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy

SCHEMES: dict[str, type[DataParallelStrategy]] = {
    "shard_ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "zero2": ZeRO2Strategy,
    "zero3": ZeRO3Strategy,
    "shard_fsdp": ZeRO3Strategy,
    "tensor_parallel": TensorParallelStrategy,
    "pipeline_parallel": PipelineParallelStrategy,
    "hybrid_parallel": HybridParallelStrategy,
    "local_sgd": LocalSGDStrategy,
    "async_sgd": AsyncSGDStrategy,
    "elastic": ElasticStrategy,
}


def register_strategies() -> None:
    """Make every name usable as `Trainer(strategy=name)`; a second call changes nothing."""
    if next(iter(SCHEMES)) not in StrategyRegistry:
        accept_compiled_modules(ShardStrategy)
    for scheme, strategy in SCHEMES.items():
        _register(scheme, strategy)
    for compression in COMPRESSORS:
        _register(f"shard_ddp_{compression}", DDPStrategy, compression=compression)


def _register(scheme: str, strategy: type[DataParallelStrategy], **options: Any) -> None:
    for name, backend in _names(scheme):
        if name not in StrategyRegistry:
            StrategyRegistry.register(
                name, strategy, description=strategy.__doc__ or "", backend=backend, **options
            )


def _names(scheme: str) -> list[tuple[str, str]]:
    return [(scheme, "auto"), *((f"{scheme}_{backend}", backend) for backend in backend_names())]
