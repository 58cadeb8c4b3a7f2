"""The arithmetic that a training step of a model needs, whoever does it: for its utilization.

Counted are matrix products, attention and convolutions of forward and backward, by torch's
FlopCounterMode on tensors without elements. What is computed again for backward is no work of the
model, so that more than three forwards, one and two for backward, never count.

Source: model FLOPs utilization, PaLM, arXiv:2204.02311, appendix B.
"""

from typing import Any

import torch
from torch import nn

from lightning_shard.pipeline_parallel.costs import FlopCounter
from lightning_shard.planner.dry_run import apart
from lightning_shard.planner.no_elements import NoElements
from lightning_shard.planner.simulated_model import Step, loss_of


def model_flops(
    module: nn.Module,
    batch: Any,
    step: Step,
    *,
    dtype: torch.dtype | None = None,
    left_out: tuple[object, ...] = (),
) -> int:
    """Return the operations of forward and backward of one batch, of the full model.

    Args:
        module: The full module, with parameters on any device, meta included; it is not changed.
        batch: Batch of which only shapes count.
        step: Runs the module's training step.
        dtype: Format of the parameters; None leaves each its own.
        left_out: Objects that the module refers to and its copy must not.

    Raises:
        Exception: The step asks for elements or for a trainer, or returns no loss.
    """
    stand_ins = NoElements()
    batch = stand_ins.batch(batch)
    with apart(), torch.enable_grad(), FlopCounter() as counter:
        copied = stand_ins.module(module, dtype=dtype, left_out=left_out).train()
        loss = loss_of(step(copied, batch))
        forward: int = counter.read()
        loss.backward()  # type: ignore[no-untyped-call]
        total: int = counter.read()
    return min(total, 3 * forward)
