"""The optimizer's step on shards in host memory.

The user's own optimizer makes it. Where its class has torch's fused kernel, the step is that kernel
on the CPU, for groups that leave the choice to torch: one pass over parameters, gradients and state
in place of one for each operation. Not in 16 bits, where it rounds otherwise, and SGD's leaves
elements out (pytorch/pytorch#191763). The groups keep the user's options; state that a checkpoint
or an earlier run has put on the device moves to where its parameter is.
"""

from collections.abc import Sequence
from inspect import unwrap
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_entries import of_parameters
from lightning_shard.data_parallel.options import EngineOptions, Offload
from lightning_shard.errors import ConfigError

_FUSED = (Adam, SGD, Adagrad)  # AdamW is an Adam
_WIDE = 4  # bytes of an element, from which the kernels are right
_OTHERWISE = ("fused", "foreach", "capturable", "differentiable")


def refuse_offload(offload: Offload, optimizers: Sequence[Optimizer]) -> ConfigError:
    """Return the error for optimizers of full matrices, whose step would be on the host."""
    names = ", ".join(type(one).__name__ for one in optimizers)
    return ConfigError(
        f"offload={offload!r} has the CPU make the optimizer's step on 1-D shards, but of {names} "
        f"at least one needs full matrices, whose products the CPU would take far too long for. "
        f"Use an element-wise optimizer such as AdamW, or leave offload out."
    )


def warn_of_cpu_ranks(options: EngineOptions, device: torch.device) -> None:
    """Warn, on rank zero, where host memory is the device's own."""
    named = [] if options.offload is None else [f"offload={options.offload!r}"]
    named += ["activation_offload=True"] if options.activation_offload else []
    for option in named if device.type == "cpu" else ():
        rank_zero_warn(
            f"{option} saves nothing on CPU ranks: what it moves to the host is there already. "
            f"They run the same code, to be tested without a GPU."
        )


class StepOnHost:
    """Lets an optimizer step on the host, from `take` to `put_back`."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._changed: list[tuple[dict[str, Any], bool | None]] = []  # with what the user has said

    def take(self) -> None:
        """Prepare a step, once parameters show shards."""
        if self._engine.copier is None:
            return
        for param, entries in of_parameters(self._optimizer):
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.ndim and value.device != param.device:
                    entries[key] = value.to(param.device)
        for group in self._optimizer.param_groups:
            said = group.get("fused")
            if (fused := self._is_fused(group)) is not said:
                self._changed.append((group, said))
                group["fused"] = fused

    def put_back(self) -> None:
        """Give the groups their options back."""
        for group, said in self._changed:
            group["fused"] = said
        self._changed = []

    def _is_fused(self, group: dict[str, Any]) -> bool | None:
        """Whether the step of a group is the fused kernel; None leaves it to torch."""
        said, step = group.get("fused"), unwrap(type(self._optimizer).step)
        if any(param.is_floating_point() and param.itemsize < _WIDE for param in group["params"]):
            return False if said and step is unwrap(SGD.step) else said
        has_kernel = any(step is unwrap(kind.step) for kind in _FUSED)
        is_free = "fused" in group and not any(group.get(name) for name in _OTHERWISE)
        may_fuse = (
            has_kernel
            and is_free
            and said is None
            and all(param.is_floating_point() for param in group["params"])
            and self._begins_alike(group)
        )
        return True if may_fuse else said

    def _begins_alike(self, group: dict[str, Any]) -> bool:
        """Whether all that is stepped has a momentum, or none: SGD's kernel takes no other list."""
        stepped = [param for param in group["params"] if param.grad is not None]
        states = [self._optimizer.state.get(param, {}) for param in stepped]
        return len({state.get("momentum_buffer") is None for state in states}) <= 1
