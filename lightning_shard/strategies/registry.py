"""The strategy names: each scheme alone and with each backend as a suffix.

A strategy's module is imported when a Trainer asks for the name.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_shard.backends.registry import backend_names
from lightning_shard.data_parallel.compression import COMPRESSORS
from lightning_shard.data_parallel.options import Offload

SCHEMES = {
    "shard_ddp": "DDPStrategy",
    "zero1": "ZeRO1Strategy",
    "zero2": "ZeRO2Strategy",
    "zero3": "ZeRO3Strategy",
    "shard_fsdp": "ZeRO3Strategy",
    "tensor_parallel": "TensorParallelStrategy",
    "pipeline_parallel": "PipelineParallelStrategy",
    "context_parallel": "ContextParallelStrategy",
    "hybrid_parallel": "HybridParallelStrategy",
    "local_sgd": "LocalSGDStrategy",
    "async_sgd": "AsyncSGDStrategy",
    "elastic": "ElasticStrategy",
}
"""By name the class."""

OFFLOADED: dict[str, tuple[str, Offload]] = {
    "zero2_offload": ("zero2", "optimizer"),
    "zero3_offload": ("zero3", "parameters"),
}
"""By name the scheme, and what it has in host memory: as Lightning's DeepSpeed names have it."""


@dataclass(frozen=True)
class NamedStrategy:
    """Makes a strategy of a package that has the classes, `lightning_shard` for example."""

    package: str
    strategy: str

    def __call__(self, **options: Any) -> Any:
        """Make the strategy."""
        return getattr(import_module(self.package), self.strategy)(**options)


def register_strategies(lightning: str, package: str) -> None:
    """Make every name usable as `Trainer(strategy=name)`; a second call changes nothing.

    Args:
        lightning: Root of Lightning: "lightning.pytorch" or "pytorch_lightning".
        package: Package whose strategies are built on that root.
    """
    registry = import_module(f"{lightning}.strategies").StrategyRegistry
    for scheme, strategy in SCHEMES.items():
        _register(registry, scheme, NamedStrategy(package, strategy))
    for compression in COMPRESSORS:
        compressed = NamedStrategy(package, SCHEMES["shard_ddp"])
        _register(registry, f"shard_ddp_{compression}", compressed, compression=compression)
    for name, (scheme, offload) in OFFLOADED.items():
        _register(registry, name, NamedStrategy(package, SCHEMES[scheme]), offload=offload)


def _register(registry: Any, scheme: str, strategy: NamedStrategy, **options: Any) -> None:
    description = f"See {strategy.package}.{strategy.strategy}."
    for name, backend in names_of(scheme):
        if name not in registry:
            registry.register(name, strategy, description, backend=backend, **options)


def names_of(scheme: str) -> list[tuple[str, str]]:
    """Return a scheme's names, alone and with each backend as a suffix, and their backends."""
    return [(scheme, "auto"), *((f"{scheme}_{backend}", backend) for backend in backend_names())]
