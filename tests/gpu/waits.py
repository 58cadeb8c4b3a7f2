"""The host's waits for a GPU within the steps of fits, as torch's own debug mode sees them.

`torch.cuda.set_sync_debug_mode` warns of what makes the host wait, but not of all: c10d's and the
sparse operations' waits are silent. `tests.gpu_like` sees more, on a device that is not there.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu_like.fits import CASES, Batches, Seen, Watched, trainer_of
from tests.gpu_like.reasons import REASONS, Reason
from tests.gpu_like.watch import Wait, where

MESSAGE = "called a synchronizing CUDA operation"
# The GPU-like device cannot show these: what seems to be the host's there is the device's to torch.
REASONS_ON_GPUS = (
    *REASONS,
    Reason(
        "lightning_shard/optim/clipping.py clip_grad_norm",
        "utils/clip_grad.py",
        "copy to the host",
        1,
        "Gradients on the host are scaled by the norm, which was combined on the device.",
    ),
    Reason(
        "lightning_shard/precision/plugins.py _agree_on_overflow",
        "",
        "copy to the host and back",
        2,
        "Whether a gradient on the host overflowed on any rank is agreed over the device's group.",
    ),
)


class SyncWatch:
    """Counts what torch warns of, for the ranks that are within a counted step."""

    def __init__(self) -> None:
        self.found: Counter[Wait] = Counter()
        self._counting: set[int] = set()

    def __deepcopy__(self, memo: Any) -> "SyncWatch":
        """Be one for all ranks, whose modules are copies of one."""
        return self

    def start_counting(self, counts: bool) -> None:
        """Count this rank's waits from here on, or count no more."""
        (self._counting.add if counts else self._counting.discard)(_rank())

    def note(self, message: Any, *_: Any, **__: Any) -> None:
        """Note a warning, in the place of `warnings.showwarning`."""
        if MESSAGE in str(message) and _rank() in self._counting:
            self.found[Wait("", *where())] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have torch warn, and only of this."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", f".*{MESSAGE}")
            warnings.showwarning = self.note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


def fit_on_gpu(name: str, precision: str, backend: str, num_ranks: int | None = None) -> Seen:
    """Fit as `gpu_like.fits.fit` does, on the first GPU; ranks of one process share it."""
    watch, seen, case = SyncWatch(), Seen(), CASES[name]
    case = replace(case, num_ranks=num_ranks or case.num_ranks)
    torch.manual_seed(0)
    model = Watched(watch, seen, case.has_unused)
    with watch.watching():
        trainer = trainer_of(case, backend, accelerator="gpu", precision=precision)
        trainer.fit(model, Batches("cuda"))
    seen.waits = [(*wait, count) for wait, count in watch.found.items()]
    return seen


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
