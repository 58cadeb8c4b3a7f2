"""`bucket_mb="auto"`: the ranks measure their links, and choose one size for all of them.

Each data-parallel group measures while the others do, as in training; the world takes the slowest
group's figures, and the smallest part of a model. So all ranks of a mesh have buckets of one size.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.stopwatch import Stopwatch
from lightning_shard.data_parallel.bucket_sizes import LinkFigures, default_mb, size_for
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.options import EngineOptions

IN_PROCESS = "the default: times within one process tell nothing"
ONE_RANK = "the default: no gradients travel"
_MB = 2**20
_SMALL_BYTES = 2**10
_LARGE_BYTES = tuple(2**power for power in range(14, 25, 2))  # 16 KB to 16 MB
_GROWTH_SECONDS = 0.25  # of one round of each size, within which the largest is found
_REPEAT_SECONDS = 0.2  # of the repeats of the smallest, and of the largest
_MOST_REPEATS = 100


class LinkTrial:
    """Sends rounds between the ranks of a data-parallel group, and times them.

        a round    stage 0         all-reduce
                   stages 1 to 3   reduce-scatter [, all-reduce over the copies], all-gather

        small      of a few elements: what a round costs at any size
        large      four times as much in each trial, up to 16 MB or what the time allows

    How often a round is timed, and whether a larger one comes, follows from the slowest rank's
    times, on which the ranks have agreed.

    Args:
        groups: Groups over which parameters travel; each rank must call every method.
        reducing: Groups over which gradients travel.
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
        """Return the least seconds of several rounds, on the rank on which they are most."""
        seconds = torch.tensor(
            self.seconds(num_bytes, times), dtype=torch.float64, device=self._reduced.device
        )
        self._groups.dp.all_reduce(seconds, "max").wait()
        return max(seconds.item(), 1e-7)

    def seconds(self, num_bytes: int, times: int) -> float:
        """Return the least seconds that a round takes on this rank, of so many."""
        watch = Stopwatch(self._groups.dp, self._reduced.device)
        return watch.seconds(partial(self._round, *self._unit(num_bytes)), rounds=times)

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


def _own(full: Tensor, ranks: Collectives) -> Tensor:
    """Return this rank's slice of a full tensor, in place."""
    return full.view(ranks.size, -1)[ranks.rank]


@dataclass(frozen=True, kw_only=True)
class BucketChoice:
    """The size in MB that "auto" has come to, and what was measured, or why nothing was."""

    mb: float
    reason: str

    def __str__(self) -> str:
        return f"buckets of {self.mb:g} MB ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Links:
    """The ranks that choose.

    Attributes:
        groups: Groups over which parameters travel.
        reducing: Groups over which gradients travel.
        are_timed: Whether times tell anything: not where ranks are threads of one process.
    """

    groups: DataGroups
    reducing: DataGroups
    everybody: Collectives
    device: torch.device
    are_timed: bool = True


def choose(
    options: EngineOptions, model: nn.Module, links: Links, split: ModelSplit | None = None
) -> BucketChoice:
    """Measure, and agree on one size; each rank of the run must call."""
    usual = partial(BucketChoice, mb=default_mb(options.stage))
    if not links.are_timed:
        return usual(reason=IN_PROCESS)
    if links.groups.dp.size == 1:
        return usual(reason=ONE_RANK)
    parts = links.everybody.all_gather_object(
        _bytes_by_dtype(model, Unsplit() if split is None else split)
    )
    own = _trial(options, links, sum(parts, Counter())).figures()
    link = slowest(links.everybody.all_gather_object(own))
    smallest = min(sum(part.values()) for part in parts)
    return BucketChoice(mb=size_for(link, smallest / 2**20), reason=f"measured: {link}")


def slowest(found: Sequence[LinkFigures]) -> LinkFigures:
    """Return the figures of the link that takes longest for a bucket of the usual size."""
    return max(found, key=lambda link: link.seconds(default_mb(0)))


def _trial(options: EngineOptions, links: Links, sizes: Counter[torch.dtype]) -> LinkTrial:
    """Prepare trials in formats that all ranks find, also where their models differ by mistake."""
    param_dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
    matrix = torch.empty(0, 0, dtype=param_dtype, device="meta")
    return LinkTrial(
        options.stage,
        links.groups,
        links.reducing,
        links.device,
        param_dtype=param_dtype,
        gather_dtype=options.full_dtype(matrix, in_block=True),
        reduce_dtype=options.reduce_dtype(matrix, in_block=True),
    )


def _bytes_by_dtype(model: nn.Module, split: ModelSplit) -> Counter[torch.dtype]:
    """Count the bytes of this rank's parameters by their format."""
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if not is_lazy(param) and split.is_here(param) and param.is_floating_point():
            sizes[param.dtype] += param.numel() * param.element_size()
    return sizes
