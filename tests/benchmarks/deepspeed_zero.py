"""DeepSpeed's ZeRO stages as contenders, where DeepSpeed is installed.

On CPUs it runs over Gloo with torch's own optimizer: `DS_BUILD_OPS=0 pip install deepspeed`, with
`--no-build-isolation`, since its build imports torch. Its settings are its defaults.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.benchmarks.contenders import ADAMW, Contender, Phase
from tests.benchmarks.model import SEQUENCES_PER_RANK, Batch
from tests.benchmarks.ranks import own_device


def is_installed() -> bool:
    """Whether there is a DeepSpeed."""
    return find_spec("deepspeed") is not None


class DeepSpeedZeRO(Contender):
    """DeepSpeed's engine under one of its stages."""

    def __init__(self, model: nn.Module, *, stage: int) -> None:
        self.stage = stage
        super().__init__(model)

    @override
    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.module, wrapped, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK[own_device().type],
                "zero_optimization": {"stage": self.stage},
                "gradient_clipping": 0.0,  # 0.19 clips at a norm of 1 by default
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        optimizer: torch.optim.Optimizer = wrapped.optimizer
        return optimizer

    @override
    def parameters(self) -> Iterable[Tensor]:
        return (getattr(param, "ds_tensor", param) for param in self.module.parameters())

    @override
    def step(self, batch: Batch, phase: Phase = nullcontext) -> Tensor:
        engine: Any = self.module
        with phase("forward"):
            loss: Tensor = engine(*batch)
        with phase("zero_grad"):
            pass  # the engine's step does so
        with phase("backward"):
            engine.backward(loss)
        with phase("optimizer"):
            engine.step()
        return loss.detach()
