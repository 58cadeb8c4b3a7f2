"""`bucket_mb="auto"`: the ranks measure their links, and choose one size for all of them.

    each data-parallel group     measures while the others do, as in training
    the world                    takes the slowest group's figures, and the smallest part of a model

So all ranks of a mesh have buckets of the same size, also where data-parallel groups differ: the
stages of a pipeline, or ranks on other hosts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.bucket_sizes import LinkFigures, default_mb, size_for
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.link_trial import LinkTrial
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.options import EngineOptions

IN_PROCESS = "the default: times within one process tell nothing"
ONE_RANK = "the default: no gradients travel"


@dataclass(frozen=True, kw_only=True)
class BucketChoice:
    """What "auto" has come to.

    Attributes:
        mb: Size up to which blocks are joined.
        reason: What was measured, or why nothing was.
    """

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
        everybody: All ranks of the run.
        device: Device of the parameters.
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
    """Measure, and agree on one size; each rank of the run must call.

    Args:
        options: Stage and formats of the engine that is to be made.
        model: The model, whose parameters may be on meta.
        links: The ranks that choose.
        split: How the model is split over other ranks.
    """
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
