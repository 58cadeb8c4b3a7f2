"""Times what a unit sends on the links of this run, just before it trains.

    a round    stage 0         all-reduce
               stages 1 to 3   reduce-scatter [, all-reduce over the copies], all-gather

    small      of a few elements: what a round costs at any size
    large      four times as much in each trial, up to 16 MB or what the time allows

The groups, the memory and the formats are those of the training that follows. How often a round is
timed, and whether a larger one comes, follows from times on which the ranks have agreed: the
slowest rank's. A slow link ends the trials early: at 1 Mbit/s with 16 KB, after half a second.
"""

import time

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.bucket_sizes import LinkFigures
from lightning_shard.data_parallel.data_groups import DataGroups

_MB = 2**20
_SMALL_BYTES = 2**10
_LARGE_BYTES = tuple(2**power for power in range(14, 25, 2))  # 16 KB to 16 MB
_GROWTH_SECONDS = 0.25  # of one round of each size, within which the largest is found
_REPEAT_SECONDS = 0.2  # of the repeats of the smallest, and of the largest
_MOST_REPEATS = 100


class LinkTrial:
    """Sends rounds between the ranks of a data-parallel group, and times them.

    Args:
        stage: The ZeRO stage, which says what a round is.
        groups: Groups over which parameters travel; each rank must call every method.
        reducing: Groups over which gradients travel.
        device: Device of the parameters.
        param_dtype: Format of the parameters, whose bytes are counted.
        gather_dtype: Format in which parameters travel.
        reduce_dtype: Format of the gradients that travel.
    """

    def __init__(
        self,
        stage: int,
        groups: DataGroups,
        reducing: DataGroups,
        device: torch.device,
        *,
        param_dtype: torch.dtype,
        gather_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self._stage, self._groups, self._reducing = stage, groups, reducing
        self._itemsize = param_dtype.itemsize
        self._gathered = torch.empty(0, dtype=gather_dtype, device=device)
        self._reduced = torch.empty(0, dtype=reduce_dtype, device=device)

    def figures(self) -> LinkFigures:
        """Return what the trials come to, the same on each rank of the group."""
        self.slowest(_SMALL_BYTES, 1)  # connects
        small = self._repeated(_SMALL_BYTES, self.slowest(_SMALL_BYTES, 1))
        single = self._grown()
        size = max(single)
        large = self._repeated(size, single[size])
        fixed = min(small, *single.values())  # none can take less, so what was disturbed is out
        each = max(large - fixed, large / 10) / (size / _MB)
        return LinkFigures(fixed_seconds=fixed, seconds_per_mb=each)

    def _grown(self) -> dict[int, float]:
        """Return the seconds of one round of each size, up to what the time allows."""
        found: dict[int, float] = {}
        for size in _LARGE_BYTES:
            found[size] = self.slowest(size, 1)
            if sum(found.values()) + 4 * found[size] > _GROWTH_SECONDS:
                break
        return found

    def _repeated(self, num_bytes: int, once: float) -> float:
        """Return the least seconds of a round that has taken so many `once`."""
        times = min(_MOST_REPEATS, int(_REPEAT_SECONDS / once))
        return min(once, self.slowest(num_bytes, times)) if times else once

    def slowest(self, num_bytes: int, times: int) -> float:
        """Return the least seconds of a round, on the rank on which they are most.

        Args:
            num_bytes: Bytes of the unit's parameters.
            times: How often it is timed.
        """
        seconds = torch.tensor(
            self.seconds(num_bytes, times), dtype=torch.float64, device=self._reduced.device
        )
        self._groups.dp.all_reduce(seconds, "max").wait()
        return max(seconds.item(), 1e-7)

    def seconds(self, num_bytes: int, times: int) -> float:
        """Return the least seconds that a round takes on this rank, of so many."""
        unit = self._unit(num_bytes)
        self._groups.dp.barrier()
        self._finish()
        taken = []
        for _ in range(times):
            begin = time.perf_counter()
            self._round(*unit)
            self._finish()
            taken.append(time.perf_counter() - begin)
        return min(taken)

    def _unit(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return memory for a unit's gradients and full parameters."""
        shards = self._groups.shard.size
        numel = -(-num_bytes // self._itemsize // shards) * shards
        grad = self._reducing.dp.new_empty(self._reduced, numel)
        full = self._groups.shard.new_empty(self._gathered, 0 if self._stage == 0 else numel)
        return grad.zero_(), full.zero_()

    def _round(self, grad: Tensor, full: Tensor) -> None:
        if self._stage == 0:
            self._reducing.dp.all_reduce(grad, "avg").wait()
            return
        reduced = _own(grad, self._reducing.shard)
        self._reducing.shard.reduce_scatter(reduced, grad, "avg").wait()
        if self._reducing.replicate is not None:
            self._reducing.replicate.all_reduce(reduced, "avg").wait()
        self._groups.shard.all_gather(full, _own(full, self._groups.shard)).wait()

    def _finish(self) -> None:
        if self._reduced.device.type == "cuda":
            torch.cuda.synchronize(self._reduced.device)


def _own(full: Tensor, ranks: Collectives) -> Tensor:
    """Return this rank's slice of a full tensor, in place."""
    return full.view(ranks.size, -1)[ranks.rank]
