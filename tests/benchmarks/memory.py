r"""Bytes per rank: each contender alone in fresh processes, counted by the operating system.

    resident set
      ^                                    .-- peak: high-water mark of one step
      |                               _/\_ |
      |                         _____/    \____  held: after the step
      |        tiny model _____|
      |  imports ____/\___|      build, 2 steps | 1 step, measured
      |_________/          ^ baseline

The resident set sees what no tensor count does: DDP's buckets, Gloo's staging buffers, temporaries
inside C++ kernels, storages resized to zero. Three things make it exact to about 1 %: the C library
is told to map every block above 64 KiB on its own (`MALLOC_MMAP_THRESHOLD_`), so that freed memory
leaves the resident set at once; a tiny model trains first under the same scheme, so that code and
lazily built tables lie in the baseline; and the high-water mark is reset before the measured step.
Checked: without communication a 25.5M-parameter model holds 410.7 MB, where 16 bytes a parameter
are 408.2 MB. Memory allocated but never written does not count. Linux with glibc only.

Parameters, gradients and optimizer state are counted apart, by their untyped storages, each once.
"""

import gc
import platform
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.benchmarks.contenders import CONTENDERS, Contender
from tests.benchmarks.model import build_model, make_batch
from tests.benchmarks.ranks import environment, on_ranks

EXACT_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
NUM_STEPS_BEFORE = 2


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of the rank that has most.

    Attributes:
        parameter_bytes: Storages of parameters, full or local, between two steps.
        gradient_bytes: Storages of their gradients, between two steps.
        state_bytes: Storages of the optimizer's state.
        held_bytes: All that is resident between two steps, buckets and buffers included.
        peak_bytes: The most that was resident during a step.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    held_bytes: int
    peak_bytes: int


def unavailable_reason() -> str | None:
    """Say why memory cannot be measured here, or None when it can."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return "it needs Linux's /proc and glibc's malloc"
    return None


def measure_footprint(model_name: str, name: str) -> Footprint:
    """Train the contender `name` alone in fresh processes and weigh it."""
    with environment(EXACT_ALLOCATION):
        return on_ranks(_weigh, model_name, name)


def _weigh(rank: int, model_name: str, name: str) -> Footprint:
    _train(rank, CONTENDERS[name].make(build_model("tiny")), NUM_STEPS_BEFORE)
    gc.collect()
    baseline_bytes = _status_bytes("VmRSS")
    contender = CONTENDERS[name].make(build_model(model_name))
    _train(rank, contender, NUM_STEPS_BEFORE)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    _train(rank, contender, 1)
    peak_bytes = _status_bytes("VmHWM")
    return _greatest(
        Footprint(
            **_category_bytes(contender),
            held_bytes=_status_bytes("VmRSS") - baseline_bytes,
            peak_bytes=peak_bytes - baseline_bytes,
        )
    )


def _train(rank: int, contender: Contender, num_steps: int) -> None:
    for step in range(num_steps):
        contender.step(make_batch(step, rank))
    dist.barrier()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}.")


def _greatest(footprint: Footprint) -> Footprint:
    numbers = torch.tensor(astuple(footprint), dtype=torch.int64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    names = (field.name for field in fields(Footprint))
    return Footprint(**dict(zip(names, numbers.tolist(), strict=True)))


def _category_bytes(contender: Contender) -> dict[str, int]:
    seen: set[int] = set()
    return {
        "parameter_bytes": unique_storage_bytes(contender.parameters(), seen),
        "gradient_bytes": unique_storage_bytes(contender.gradients(), seen),
        "state_bytes": unique_storage_bytes(contender.states(), seen),
    }


def unique_storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Sum the bytes of the storages of `tensors` that are not in `seen` yet.

    Args:
        tensors: Views, ties and DTensors are welcome; of a DTensor this rank's part counts.
        seen: Addresses of storages already counted; grows.
    """
    total_bytes = 0
    for tensor in tensors:
        local = tensor.detach()
        storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
        if storage.nbytes() > 0 and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total_bytes += storage.nbytes()
    return total_bytes
