"""Agreement on which parameters have a gradient, so that every rank's optimizer skips the same.

A parameter that no rank used has no gradient on a single device, and an optimizer leaves it
alone; one that any rank used has. After the gradients, ranks take the maximum of one byte per
parameter. Only a rank that did not use some parameter itself has to read the answer.
"""

from collections.abc import Sequence

import torch

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.flat_gradients import FlatGradients


class UsageAgreement:
    """One agreement per optimizer step over all parameters of an engine."""

    def __init__(
        self, gradients: Sequence[FlatGradients], collectives: Collectives, device: torch.device
    ) -> None:
        self._gradients = gradients
        self._collectives = collectives
        self._device = device
        self._pending: Pending | None = None
        self._flags = torch.empty(0)

    def begin(self) -> None:
        """Start the exchange; each rank must call, after its last reduction has started."""
        used = [flag for gradients in self._gradients for flag in gradients.used]
        self._flags = torch.tensor(used, dtype=torch.uint8, device=self._device)
        self._pending = self._collectives.all_reduce(self._flags, "max", async_op=True)

    def finish(self) -> None:
        """Wait, and mark what is valid."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        complete = all(
            used or not param.requires_grad
            for gradients in self._gradients
            for used, param in zip(gradients.used, gradients.flat.params, strict=True)
        )
        used = [flag for gradients in self._gradients for flag in gradients.used]
        flags = used if complete else self._flags.bool().tolist()
        start = 0
        for gradients in self._gradients:
            stop = start + len(gradients.used)
            new = flags[start:stop]
            gradients.valid = [a or b for a, b in zip(gradients.valid, new, strict=True)]
            start = stop
