"""What this rank holds now, by kind, for a message: counted by storage, and allocating nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import held, storage_bytes
from lightning_shard.sizes import format_bytes

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class MemoryKinds:
    """Bytes of one rank, by kind.

    Attributes:
        parameters: Bytes of parameters between the steps, master copies included.
        gathered: Bytes of units that are full for the moment, under ZeRO stage 3.
        gradients: Bytes of gradients that wait for the optimizer.
        communication: Bytes of full gradients that are on their way to the ranks that have them.
        optimizer_state: Bytes of the optimizer's state.
        offloaded: Bytes in host memory besides, under offload.
        activations_on_host: Bytes of the host memory that activations lie in.
        gathered_matrices: Bytes of matrices and their gradients that an optimizer of full matrices
            needs on this rank while it updates them, where layers are in parts.
        others: Bytes of activations and all else that torch has allocated on the device; None where
            that cannot be told, as on a CPU.
        process: Bytes of the whole process, where `others` cannot be told; None where neither can.
    """

    parameters: int
    gathered: int
    gradients: int
    communication: int
    optimizer_state: int
    offloaded: int = 0
    activations_on_host: int = 0
    gathered_matrices: int = 0
    others: int | None = None
    process: int | None = None

    @property
    def known(self) -> int:
        """Sum of the kinds that the engine knows."""
        state = self.parameters + self.gradients + self.optimizer_state
        return state + self.gathered + self.communication

    def __str__(self) -> str:
        parts = [
            f"parameters {format_bytes(self.parameters)}",
            f"gathered units {format_bytes(self.gathered)}",
            f"gradients {format_bytes(self.gradients)}",
            f"communication buffers {format_bytes(self.communication)}",
            f"optimizer state {format_bytes(self.optimizer_state)}",
        ]
        if self.offloaded:
            parts.append(f"in host memory {format_bytes(self.offloaded)}")
        if self.activations_on_host:
            parts.append(f"activations in host memory {format_bytes(self.activations_on_host)}")
        if self.gathered_matrices:
            size = format_bytes(self.gathered_matrices)
            parts.append(f"matrices gathered while an optimizer updates them {size}")
        if self.others is not None:
            parts.append(f"activations and others {format_bytes(self.others)}")
        elif self.process is not None:
            parts.append(
                f"activations and others unknown, in a process of {format_bytes(self.process)}"
            )
        return ", ".join(parts)


def kinds_of(
    engine: DataParallelEngine,
    optimizers: Iterable[Optimizer],
    *,
    activations_on_host: int = 0,
    gathered_matrices: int = 0,
) -> MemoryKinds:
    """Return what this rank holds now.

    Args:
        engine: The engine whose model it is.
        optimizers: All optimizers of the model.
        activations_on_host: Bytes of the host memory that activations lie in.
        gathered_matrices: Bytes that this rank gathers for an update.
    """
    counted = held(engine, optimizers)
    gathered = storage_bytes(
        flat.full for flat in engine.flats if flat.reshards and flat.common is None
    )
    on_their_way = storage_bytes(
        one.buffer.full
        for one in engine.gradients
        if one.buffer.full is not None and not one.accumulates
    )
    found = MemoryKinds(
        parameters=counted.parameters - gathered,
        gathered=gathered,
        gradients=counted.gradients - on_their_way,
        communication=on_their_way,
        optimizer_state=counted.optimizer_state,
        offloaded=counted.offloaded,
        activations_on_host=activations_on_host,
        gathered_matrices=gathered_matrices,
    )
    return _with_others(found, engine.device)


def _with_others(found: MemoryKinds, device: torch.device) -> MemoryKinds:
    own = vars(found)
    if device.type == "cuda":
        others = max(torch.cuda.memory_allocated(device) - found.known, 0)
        return MemoryKinds(**(own | {"others": others}))
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return found
    return MemoryKinds(**(own | {"process": pages * _PAGE_BYTES}))
