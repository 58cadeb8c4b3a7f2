"""Every strategy on a small GPT in float64, where another device explains no difference above 1e-9.

Some compute in float32 on the way, a router of experts say; of lossy ones a GPU may send others.

What ranks of one process on the CPU make of it is compared with a single device in
`tests/strategies`: GPUs are compared with those ranks, so that lossy schemes have a reference, too.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import lightning_shard
from tests.strategies.models import Trained
from tests.strategies.parity import STRATEGIES, Run, build, ignore_upstream_warnings, train
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

SIZES = (1, 2, 3, 4, 8)
NUM_STEPS = 5


Tolerance = tuple[float, float]
"""Relative, and absolute for weights near zero."""
EXACT: Tolerance = (1e-9, 1e-12)
IN_FLOAT32: Tolerance = (1e-5, 1e-6)
LOSSY: Tolerance = (1e-2, 1e-3)  # seen with int8, whose random numbers are others on a GPU: 2e-3


@dataclass(frozen=True)
class Scheme:
    """One strategy.

    Attributes:
        divisor: What the number of ranks is a multiple of.
        tolerance: By how much two devices may differ: losses and norms relatively, and weights.
        clips_early: Whether gradients are clipped before they are sent.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    divisor: int = 1
    tolerance: Tolerance = EXACT
    clips_early: bool = False

    def sizes(self) -> list[int]:
        """Return the numbers of ranks that it is tried on."""
        return [size for size in SIZES if size % self.divisor == 0]


_SPLIT: dict[str, Any] = {"tensor_parallel_size": 2, "plan": PLANS["gpt"]}
_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 2}
_HYBRID = "HybridParallelStrategy"
_COMPRESSORS = {
    "fp16": IN_FLOAT32,
    "int8": LOSSY,
    "topk": LOSSY,  # of values that are equally great a GPU may take others
    "powersgd": IN_FLOAT32,
    "onebit": IN_FLOAT32,
}
_KEEP_WHAT_IS_LEFT = ("topk", "powersgd")  # onebit does, too, after its dense warm-up

SCHEMES = {
    "shard_ddp": Scheme("DDPStrategy"),
    "zero1": Scheme("ZeRO1Strategy"),
    "zero2": Scheme("ZeRO2Strategy"),
    "zero3": Scheme("ZeRO3Strategy", {"bucket_mb": 0.001}),
    "zero2_auto": Scheme("ZeRO2Strategy", {"bucket_mb": "auto"}),
    "zero3_prefetch": Scheme("ZeRO3Strategy", {"bucket_mb": 0.001, "prefetch": 2}),
    "zero3_checkpointing": Scheme("ZeRO3Strategy", {"activation_checkpointing": "full"}),
    "zero3_host_activations": Scheme("ZeRO3Strategy", {"activation_offload": True}),
    "zero2_offload": Scheme("ZeRO2Strategy", {"offload": "optimizer"}),
    "zero3_offload": Scheme("ZeRO3Strategy", {"offload": "parameters"}),
    **{
        f"shard_ddp_{name}": Scheme(
            "DDPStrategy",
            {"compression": name},
            divisor=2,
            tolerance=tolerance,
            clips_early=name in _KEEP_WHAT_IS_LEFT,
        )
        for name, tolerance in _COMPRESSORS.items()
    },
    "tensor_parallel": Scheme("TensorParallelStrategy", _SPLIT, divisor=2),
    "context_parallel": Scheme("ContextParallelStrategy", {"context_parallel_size": 2}, divisor=2),
    "pipeline_parallel": Scheme("PipelineParallelStrategy", _STAGES, "gpt_8", divisor=2),
    "hybrid_parallel": Scheme(_HYBRID, {**_STAGES, **_SPLIT, "zero_stage": 2}, "gpt_8", divisor=4),
    "expert_parallel": Scheme(
        _HYBRID, {"expert_parallel_size": 2}, "mixtral", divisor=2, tolerance=IN_FLOAT32
    ),
    "hybrid_sharding": Scheme(_HYBRID, {"data_parallel_size": (2, 2), "zero_stage": 3}, divisor=4),
    "local_sgd": Scheme("LocalSGDStrategy", {"sync_every": 2}),
    "elastic": Scheme("ElasticStrategy", {"scheme": "zero2", "snapshot_every": 2}),
}
"""By name. `async_sgd` is not one of them: its gradients arrive in no fixed order."""


def train_scheme(name: str, num_ranks: int, backend: str, accelerator: str = "cpu") -> Run:
    """Train under a scheme; processes of one rank each all call, ranks of one share a GPU."""
    ignore_upstream_warnings()
    warnings.filterwarnings("ignore", ".*saves nothing on CPU ranks")
    scheme = SCHEMES[name]
    make: Callable[..., Any] = getattr(lightning_shard, scheme.strategy)
    share = {"num_ranks": num_ranks} if backend == "in_process" else {}
    run = train(
        _built(scheme.model),
        num_steps=NUM_STEPS,
        accelerator=accelerator,
        devices=1 if share else num_ranks,
        precision="64-true",
        strategy=make(backend=backend, timeout=60, **share, **scheme.options),
    )
    return on_host(run)


def _built(name: str) -> Trained:
    """Return a model whose experts are multiplied one by one: torch groups no float64."""
    model = build(name)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model


def on_host(run: Run) -> Run:
    """Return a run with its weights in host memory."""
    weights = {name: value.cpu() for name, value in run.weights.items()}
    return Run(losses=run.losses, norms=run.norms, weights=weights)


def train_precisely(
    strategy: str | None, precision: str, num_ranks: int, accelerator: str, shares: bool = False
) -> Run:
    """Train in a precision under a stage, or on a single device for None; each rank calls.

    Args:
        strategy: A key of `parity.STRATEGIES`, or None.
        precision: As the Trainer has it.
        num_ranks: Number of ranks.
        accelerator: As the Trainer has it.
        shares: Whether the ranks are this process's, and share one device.
    """
    ignore_upstream_warnings()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    options: dict[str, Any] = {"accelerator": accelerator, "precision": precision}
    if shares and strategy is not None:
        options["strategy"] = STRATEGIES[strategy](backend="in_process", num_ranks=num_ranks)
    elif strategy is not None:
        options |= {"strategy": strategy, "devices": num_ranks}
    return on_host(train(build("gpt"), num_steps=NUM_STEPS, **options))
