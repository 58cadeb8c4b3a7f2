"""The modules that define the package's names, each imported on first use."""

_STRATEGIES = "lightning_shard.strategies"

HOMES = {
    "AutoStrategy": "lightning_shard.strategies.auto_strategy",
    "AsyncSGDStrategy": f"{_STRATEGIES}.async_sgd",
    "BackendUnavailableError": "lightning_shard.errors",
    "CheckpointError": "lightning_shard.errors",
    "CollectiveMismatchError": "lightning_shard.errors",
    "ConfigError": "lightning_shard.errors",
    "ContextParallelStrategy": f"{_STRATEGIES}.model_parallel",
    "DDPStrategy": f"{_STRATEGIES}.data_parallel",
    "DeadlockError": "lightning_shard.errors",
    "ElasticStrategy": f"{_STRATEGIES}.elastic",
    "HybridParallelStrategy": f"{_STRATEGIES}.model_parallel",
    "LayoutError": "lightning_shard.errors",
    "LocalSGDStrategy": f"{_STRATEGIES}.local_sgd",
    "ParallelMesh": "lightning_shard.core.mesh",
    "PipelineParallelStrategy": f"{_STRATEGIES}.model_parallel",
    "RankFailedError": "lightning_shard.errors",
    "ShardError": "lightning_shard.errors",
    "TensorParallelStrategy": f"{_STRATEGIES}.model_parallel",
    "ZeRO1Strategy": f"{_STRATEGIES}.data_parallel",
    "ZeRO2Strategy": f"{_STRATEGIES}.data_parallel",
    "ZeRO3Strategy": f"{_STRATEGIES}.data_parallel",
    "plan": "lightning_shard.planning.search",
    "load_safetensors": "lightning_shard.checkpoint.conversion.loading",
    "prove": "lightning_shard.tools.proving.prove",
}
"""By name, the module that defines it."""
