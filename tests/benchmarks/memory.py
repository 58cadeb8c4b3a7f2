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

On a GPU all of this is what torch's allocator says.

Parameters, gradients and optimizer state are counted apart, by their untyped storages, each once.
"""

import gc
import platform
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.benchmarks.contenders import Contender
from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.model import build_model, make_batch
from tests.benchmarks.ranks import Ranks, environment, finish, own_device

EXACT_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
NUM_STEPS_BEFORE = 2
NUM_SAMPLED_STEPS = 3
SAMPLE_SECONDS = 0.003


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of the rank that has most.

    Attributes:
        parameter_bytes: Storages of parameters, full or local, between two steps.
        gradient_bytes: Storages of their gradients, between two steps.
        state_bytes: Storages of the optimizer's state.
        held_bytes: All that is resident between two steps, buckets and buffers included.
        peak_bytes: The most that was resident during a step.
        host_peak_bytes: The same of all ranks together, memory that several share counted once;
            sampled, 0 on GPUs.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    held_bytes: int
    peak_bytes: int
    host_peak_bytes: int


def unavailable_reason(ranks: Ranks) -> str | None:
    """Say why memory cannot be measured here, or None when it can."""
    if ranks.device_type == "cuda":
        return None
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return "it needs Linux's /proc and glibc's malloc"
    return None


def measure_footprint(ranks: Ranks, model_name: str, name: str) -> Footprint:
    """Train the contender `name` alone in fresh processes and weigh it."""
    with environment(EXACT_ALLOCATION):
        return ranks.run(_weigh, model_name, name)


def _weigh(rank: int, model_name: str, name: str) -> Footprint:
    device = own_device()
    _train(rank, CONTENDERS[name].make(build_model("tiny").to(device)), NUM_STEPS_BEFORE)
    gc.collect()
    baseline_bytes, shared_baseline = _held_bytes(device), _shared_out_bytes()
    contender = CONTENDERS[name].make(build_model(model_name).to(device))
    _train(rank, contender, NUM_STEPS_BEFORE)
    gc.collect()
    _forget_peak(device)
    _train(rank, contender, 1)
    peak_bytes = _peak_bytes(device)
    with _Sampled() as sampled:
        _train(rank, contender, NUM_SAMPLED_STEPS)
    own = Footprint(
        **_category_bytes(contender),
        held_bytes=_held_bytes(device) - baseline_bytes,
        peak_bytes=peak_bytes - baseline_bytes,
        host_peak_bytes=sampled.most_bytes - shared_baseline if device.type == "cpu" else 0,
    )
    return _together(own)


def _train(rank: int, contender: Contender, num_steps: int) -> None:
    for step in range(num_steps):
        contender.step(make_batch(step, rank, own_device()))
    finish()


def _held_bytes(device: torch.device) -> int:
    """Return what is resident; on a GPU, what torch's allocator was asked for.

    What it has given away is more by what it did not split off: up to 1 MB of each tensor.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
    return _status_bytes("VmRSS")


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}.")


def _shared_out_bytes() -> int:
    """Return this process's share of what is resident: what N processes map counts 1/N in each."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise LookupError("/proc/self/smaps_rollup has no Pss.")


class _Sampled:
    """The most that `_shared_out_bytes` says inside, as a thread asks again and again."""

    def __enter__(self) -> "_Sampled":
        self.most_bytes, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.most_bytes = max(self.most_bytes, _shared_out_bytes())


def _together(own: Footprint) -> Footprint:
    """Return what the rank has that has most, and of the host what all have."""
    numbers = torch.tensor(astuple(own), dtype=torch.int64, device=own_device())
    most, total = numbers, numbers.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    names = [field.name for field in fields(Footprint)]
    greatest = Footprint(**dict(zip(names, most.tolist(), strict=True)))
    return replace(greatest, host_peak_bytes=int(total[names.index("host_peak_bytes")]))


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
