"""The names of strategies as data, without torch: what each is, and what it needs.

`Trainer(strategy=...)` takes each name alone and with a backend as a suffix, and `lightning-shard
strategies` prints them. A strategy's module, and that of each name of the package (`HOMES`), is
imported on first use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

OFFLOADED: dict[str, tuple[str, str]] = {
    "zero2_offload": ("zero2", "optimizer"),
    "zero3_offload": ("zero3", "parameters"),
}
"""By name the scheme, and what it has in host memory: as Lightning's DeepSpeed names have it."""
BY_STAGE = ("shard_ddp", "zero1", "zero2", "zero3")
"""By ZeRO stage the scheme that keeps a full model on each rank, or shards of it."""
COMPRESSIONS = {
    "fp16": "half of the bytes",
    "bf16": "half of the bytes",
    "int8": "a quarter of the bytes",
    "int4": "an eighth of the bytes",
    "topk": "the largest entries",
    "powersgd": "matrices of low rank",
    "onebit": "signs, after some steps in full",
}
"""By name of a compression of `shard_ddp`'s gradients what is sent."""
BACKENDS = {
    "nccl": "GPUs, one rank to a device",
    "gloo": "CPU ranks, on one host or several",
    "mpi": "CPU ranks that mpirun starts",
    "shm": "CPU ranks, over shared memory on each host",
    "in_process": "ranks that are threads of this process: tests, notebooks, debugging",
}
"""By name of a backend, which is the suffix of a strategy's name, what it is for."""
_OFFLOADED_TEXT = {
    "optimizer": "gradients and optimizer state",
    "parameters": "parameters, gradients and optimizer state",
}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way of training one model on many devices.

    Attributes:
        class_name: Name of its class in `lightning_shard`.
        needs: What a model or a run must have for it; empty where any does.
        under_fabric: Why it is not for Fabric, and what to use there; empty where it works.
    """

    class_name: str
    text: str
    needs: str = ""
    under_fabric: str = ""


_ZERO3 = Scheme(
    class_name="ZeRO3Strategy", text="Parameters, gradients and optimizer state are sharded."
)
SCHEMES: dict[str, Scheme] = {
    "shard_ddp": Scheme(
        class_name="DDPStrategy", text="Every rank has the full model; gradients are averaged."
    ),
    "zero1": Scheme(class_name="ZeRO1Strategy", text="Optimizer state is sharded."),
    "zero2": Scheme(class_name="ZeRO2Strategy", text="Gradients and optimizer state are sharded."),
    "zero3": _ZERO3,
    "shard_fsdp": _ZERO3,
    "tensor_parallel": Scheme(
        class_name="TensorParallelStrategy",
        text="Ranks share every layer.",
        needs="layers that can be split: found by trial, or a plan",
        under_fabric="a Trainer splits the layers; under Fabric use 'zero3', which shards them",
    ),
    "pipeline_parallel": Scheme(
        class_name="PipelineParallelStrategy",
        text="Ranks have consecutive blocks.",
        needs="a list of blocks, one for each stage at least; microbatches",
        under_fabric="a Trainer runs the microbatches of its training_step; under Fabric use "
        "'zero3', which shards the layers",
    ),
    "context_parallel": Scheme(
        class_name="ContextParallelStrategy",
        text="Ranks share every sequence.",
        needs="repeated blocks that take tensors of shape (batch, positions, features)",
        under_fabric="a Trainer gives ranks of a sequence the same batches; under Fabric use "
        "'zero3' with activation_checkpointing",
    ),
    "hybrid_parallel": Scheme(
        class_name="HybridParallelStrategy",
        text="Tensor, context, expert, pipeline and data parallel at once.",
        needs="what each of those asked for needs; a mesh that multiplies to the number of ranks",
        under_fabric="a Trainer splits the model and runs its microbatches; under Fabric use "
        "'zero3', which shards it",
    ),
    "shard_auto": Scheme(
        class_name="AutoStrategy",
        text="Plans when a fit begins, and becomes what it has chosen.",
        needs="a training_step that asks for no elements",
        under_fabric="a Trainer's fit has the batch that it plans with; under Fabric use 'zero2', "
        "or what `lightning-shard plan` recommends",
    ),
    "local_sgd": Scheme(
        class_name="LocalSGDStrategy",
        text="Ranks train alone and average every few steps.",
        under_fabric="a Trainer counts the steps between two exchanges; under Fabric use "
        "'shard_ddp' with compression='int8', or fabric.no_backward_sync",
    ),
    "async_sgd": Scheme(
        class_name="AsyncSGDStrategy",
        text="Ranks do not wait for each other's gradients.",
        under_fabric="a Trainer counts the steps of each rank; under Fabric use 'shard_ddp'",
    ),
    "elastic": Scheme(
        class_name="ElasticStrategy",
        text="Ranks may be lost and join.",
        needs="gloo or nccl between processes; memory for each rank's copy at another",
        under_fabric="a Trainer's loop is what goes on after a rank is lost; under Fabric use "
        "'zero2', and restart from what fabric.save has written",
    ),
}
"""By name the scheme."""


@dataclass(frozen=True, kw_only=True)
class NamedScheme:
    """A name of a strategy without a backend."""

    name: str
    scheme: Scheme
    text: str
    options: dict[str, str]


def named_schemes() -> Iterator[NamedScheme]:
    """Yield every name that stands without a backend's suffix."""
    for name, scheme in SCHEMES.items():
        yield NamedScheme(name=name, scheme=scheme, text=scheme.text, options={})
    for compression, sent in COMPRESSIONS.items():
        yield NamedScheme(
            name=f"shard_ddp_{compression}",
            scheme=SCHEMES["shard_ddp"],
            text=f"As shard_ddp; of gradients {sent}.",
            options={"compression": compression},
        )
    for name, (plain, offload) in OFFLOADED.items():
        yield NamedScheme(
            name=name,
            scheme=SCHEMES[plain],
            text=f"As {plain}, {_OFFLOADED_TEXT[offload]} in host memory.",
            options={"offload": offload},
        )


def names_of(name: str) -> list[tuple[str, str]]:
    """Return a scheme's names, alone and with each backend as a suffix, and their backends."""
    return [(name, "auto"), *((f"{name}_{backend}", backend) for backend in BACKENDS)]


@dataclass(frozen=True)
class NamedStrategy:
    """Makes a strategy of a package that has the classes, `lightning_shard` for example."""

    package: str
    strategy: str

    def __call__(self, **options: Any) -> Any:
        """Make the strategy."""
        return getattr(import_module(self.package), self.strategy)(**options)


def register_strategies(lightning: str, package: str) -> None:
    """Make every name usable as `Trainer(strategy=name)`; a second call changes nothing."""
    registry = import_module(f"{lightning}.strategies").StrategyRegistry
    for one in named_schemes():
        strategy = NamedStrategy(package, one.scheme.class_name)
        for name, backend in names_of(one.name):
            if name not in registry:
                description = f"See {package}.{one.scheme.class_name}."
                registry.register(name, strategy, description, backend=backend, **one.options)


_DEFINED_IN = {
    "checkpoint.conversion.loading": ("load_safetensors",),
    "core.mesh": ("ParallelMesh",),
    "errors": (
        *("BackendUnavailableError", "CheckpointError", "CollectiveMismatchError", "ConfigError"),
        *("DeadlockError", "LayoutError", "RankFailedError", "ShardError"),
    ),
    "planning.search": ("plan",),
    "strategies.async_sgd": ("AsyncSGDStrategy",),
    "strategies.auto_strategy": ("AutoStrategy",),
    "strategies.data_parallel": ("DDPStrategy", "ZeRO1Strategy", "ZeRO2Strategy", "ZeRO3Strategy"),
    "strategies.elastic": ("ElasticStrategy",),
    "strategies.local_sgd": ("LocalSGDStrategy",),
    "strategies.model_parallel": (
        *("ContextParallelStrategy", "HybridParallelStrategy", "PipelineParallelStrategy"),
        "TensorParallelStrategy",
    ),
    "tools.proving.prove": ("prove",),
}
HOMES = {
    name: f"lightning_shard.{module}" for module, names in _DEFINED_IN.items() for name in names
}
"""By name of the package, the module that defines it."""
