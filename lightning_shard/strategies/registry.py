"""The strategy names: each scheme alone and with each backend as a suffix.

A strategy's module is imported when a Trainer asks for the name.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_shard.backends.registry import backend_names
from lightning_shard.data_parallel.compression import COMPRESSORS

SCHEMES = {
    "shard_ddp": "DDPStrategy",
    "zero1": "ZeRO1Strategy",
    "zero2": "ZeRO2Strategy",
    "zero3": "ZeRO3Strategy",
    "shard_fsdp": "ZeRO3Strategy",
    "tensor_parallel": "TensorParallelStrategy",
    "pipeline_parallel": "PipelineParallelStrategy",
    "hybrid_parallel": "HybridParallelStrategy",
    "local_sgd": "LocalSGDStrategy",
    "async_sgd": "AsyncSGDStrategy",
    "elastic": "ElasticStrategy",
}
"""By name the class."""


@dataclass(frozen=True)
class _NamedStrategy:
    """Makes a strategy of a package that has the classes, `lightning_shard` for example."""

    package: str
    strategy: str

    def __call__(self, **options: Any) -> Any:
        return getattr(import_module(self.package), self.strategy)(**options)


def register_strategies(lightning: str, package: str) -> None:
    """Make every name usable as `Trainer(strategy=name)`; a second call changes nothing.

    Args:
        lightning: Root of Lightning: "lightning.pytorch" or "pytorch_lightning".
        package: Package whose strategies are built on that root.
    """
    registry = import_module(f"{lightning}.strategies").StrategyRegistry
    for scheme, strategy in SCHEMES.items():
        _register(registry, scheme, _NamedStrategy(package, strategy))
    for compression in COMPRESSORS:
        compressed = _NamedStrategy(package, SCHEMES["shard_ddp"])
        _register(registry, f"shard_ddp_{compression}", compressed, compression=compression)


def _register(registry: Any, scheme: str, strategy: _NamedStrategy, **options: Any) -> None:
    description = f"See {strategy.package}.{strategy.strategy}."
    for name, backend in _names(scheme):
        if name not in registry:
            registry.register(name, strategy, description, backend=backend, **options)


def _names(scheme: str) -> list[tuple[str, str]]:
    return [(scheme, "auto"), *((f"{scheme}_{backend}", backend) for backend in backend_names())]
