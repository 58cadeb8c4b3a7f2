"""Every way of training one model on many devices, as Lightning strategies.

Importing the package registers the strategy names, `Trainer(strategy="zero3")`, with each Lightning
that the process imports, before or after: `lightning.pytorch` and `pytorch_lightning`. The package
imports neither, nor torch, before something of it is used: `lightning-shard --help` is quick.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_shard.core.registration import register_on_import
from lightning_shard.core.schemes import HOMES

if TYPE_CHECKING:
    __version__: str
    from lightning_shard.checkpoint.conversion.loading import load_safetensors
    from lightning_shard.core.mesh import ParallelMesh
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
    from lightning_shard.planning.search import plan
    from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
    from lightning_shard.strategies.auto_strategy import AutoStrategy
    from lightning_shard.strategies.data_parallel import (
        DDPStrategy,
        ZeRO1Strategy,
        ZeRO2Strategy,
        ZeRO3Strategy,
    )
    from lightning_shard.strategies.elastic import ElasticStrategy
    from lightning_shard.strategies.local_sgd import LocalSGDStrategy
    from lightning_shard.strategies.model_parallel import (
        ContextParallelStrategy,
        HybridParallelStrategy,
        PipelineParallelStrategy,
        TensorParallelStrategy,
    )
    from lightning_shard.tools.proving.prove import prove
else:

    def __getattr__(name: str) -> Any:
        """Import a name of the package, or a module in it, on first use."""
        if name in HOMES:
            value = getattr(import_module(HOMES[name]), name)
        elif name == "__version__":
            value = version("lightning-shard")
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]


__all__ = [
    "AsyncSGDStrategy",
    "AutoStrategy",
    "BackendUnavailableError",
    "CheckpointError",
    "CollectiveMismatchError",
    "ConfigError",
    "ContextParallelStrategy",
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
    "load_safetensors",
    "plan",
    "prove",
]

register_on_import()
