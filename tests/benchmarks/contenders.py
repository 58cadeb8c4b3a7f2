"""Ways of training the same model that the benchmark compares, behind one `step`.

A step has Lightning's order: forward, `zero_grad`, backward, `optimizer.step`. All contenders use
fused AdamW with the same options and start from the same weights, so their losses must agree.
Their names and options are in `entries`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.bucket_choice import Links, choose
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from tests.benchmarks.model import Batch
from tests.benchmarks.ranks import own_device

Phase = Callable[[str], AbstractContextManager[object]]

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


class Contender(ABC):
    """One model with its optimizer under one scheme."""

    def __init__(self, model: nn.Module) -> None:
        self.module: nn.Module = model
        self.optimizer = self.shard(model)

    @abstractmethod
    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        """Put `model` under the scheme and return its optimizer; every rank calls."""

    def computing(self) -> AbstractContextManager[object]:
        """Enclose forward and backward."""
        return nullcontext()

    def reducing(self) -> AbstractContextManager[object]:
        """Enclose backward."""
        return nullcontext()

    def parameters(self) -> Iterable[Tensor]:
        """Yield what holds this rank's parameters; the same storage may come twice."""
        return self.module.parameters()

    def gradients(self) -> Iterable[Tensor]:
        """Yield what holds this rank's gradients."""
        return (param.grad for param in self.module.parameters() if param.grad is not None)

    def states(self) -> Iterable[Tensor]:
        """Yield what holds this rank's optimizer state."""
        states = self.stateful_optimizer().state.values()
        return filter(torch.is_tensor, chain.from_iterable(state.values() for state in states))

    def stateful_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose state is this rank's."""
        return self.optimizer

    def step(self, batch: Batch, phase: Phase = nullcontext) -> Tensor:
        """Train on this rank's `batch`; every rank calls.

        Args:
            batch: Different on every rank.
            phase: Encloses each named part of the step; what it leaves out is `computing`'s own.

        Returns:
            This rank's loss, a detached scalar.
        """
        with self.computing():
            with phase("forward"):
                loss: Tensor = self.module(*batch)
            with phase("zero_grad"):
                self.optimizer.zero_grad()
            with phase("backward"), self.reducing():
                loss.backward()  # type: ignore[no-untyped-call]
        with phase("optimizer"):
            self.optimizer.step()
        return loss.detach()


class Local(Contender):
    """Each rank trains alone."""

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **ADAMW)


class LocalShard(Contender):
    """Each rank trains alone, and updates one of as many parts as there are ranks: the floor."""

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        by_size = sorted(model.parameters(), key=Tensor.numel)
        own = by_size[dist.get_rank() :: dist.get_world_size()]
        optimizer = torch.optim.AdamW(own, **ADAMW)
        optimizer.zero_grad = model.zero_grad  # type: ignore[method-assign]
        return optimizer


class TorchDDP(Contender):
    """torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module, *, bucket_view: bool = False) -> None:
        self.bucket_view = bucket_view
        super().__init__(model)

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        self.module = DistributedDataParallel(model, gradient_as_bucket_view=self.bucket_view)
        return torch.optim.AdamW(model.parameters(), **ADAMW)


class TorchZeroRedundancy(Contender):
    """torch's DistributedDataParallel with its optimizer state sharded."""

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        # Here, because importing it warns of torch's own use of torch.jit (torch 2.13).
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.module = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **ADAMW,
        )
        self.local_optimizer: torch.optim.Optimizer = optimizer.optim
        return optimizer

    def stateful_optimizer(self) -> torch.optim.Optimizer:
        return self.local_optimizer


class TorchFSDP2(Contender):
    """torch's `fully_shard` on every block and on the root."""

    def __init__(self, model: nn.Module, *, reshard: bool) -> None:
        self.reshard = reshard
        super().__init__(model)

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        mesh = init_device_mesh(own_device().type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard)
        return torch.optim.AdamW(model.parameters(), **ADAMW)


class CheckpointedFSDP2(TorchFSDP2):
    """FSDP2 whose blocks are computed again in backward."""

    def shard(self, model: Any) -> torch.optim.Optimizer:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return super().shard(model)


class Sharded(Contender):
    """Our data-parallel engine, over the default group or another backend."""

    def __init__(self, model: nn.Module, *, options: EngineOptions, backend: str = "") -> None:
        self.options, self.backend = options, backend
        super().__init__(model)

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        backend = get_backend(self.backend or dist.get_backend())
        group = dist.new_group(backend=backend.c10d_name) if self.backend else dist.group.WORLD
        assert group is not None
        collectives = backend.collectives(group)
        groups = DataGroups.of(collectives)
        options, reducing = self.options, groups.duplicate()
        if options.bucket_mb == "auto":
            links = Links(
                groups=groups, reducing=reducing, everybody=collectives, device=own_device()
            )
            choice = choose(options, model, links)
            options = replace(options, bucket_mb=choice.mb)
            if dist.get_rank() == 0:
                print(f"ZeRO stage {options.stage}: {choice}")
        self.engine = DataParallelEngine(model, groups, options, reducing)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.sharded_optimizer = ShardedOptimizer(optimizer, self.engine)
        return optimizer

    def parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable((flat.full, flat.shard) for flat in self.engine.flats)

    def gradients(self) -> Iterable[Tensor]:
        return chain.from_iterable(gradients.buffers() for gradients in self.engine.gradients)

    def computing(self) -> AbstractContextManager[object]:
        return self.engine.step()

    def reducing(self) -> AbstractContextManager[object]:
        return self.engine.backward()


class CheckpointedSharded(Sharded):
    """Our engine, whose blocks are computed again in backward."""

    def shard(self, model: Any) -> torch.optim.Optimizer:
        self._checkpointing = checkpointed_blocks(model, "full")
        self._checkpointing.__enter__()  # for good
        return super().shard(model)
