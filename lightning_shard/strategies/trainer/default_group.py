"""In a step, what `torch.distributed` is asked without a group is asked of ranks of other samples.

    dist.get_world_size()   dist.get_rank()   dist.all_reduce(n)   dist.broadcast(x, src=0)

The default group has all processes, of which those of one model are given the same samples: a sum
over it would count each of them several times. Calls that name a group are left alone. The
functions are exchanged while a step runs, and what runs on other threads then is left alone, too.

A metric of torchmetrics gathers its state over the default group, too. So that each data-parallel
rank counts once, and not every rank of the world, the metrics of a module are told, for the length
of a run, to gather over the data-parallel ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from inspect import signature
from threading import Lock
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

_NAMES = (
    *("get_rank", "get_world_size", "all_reduce", "broadcast", "reduce", "all_gather", "barrier"),
    *("all_gather_into_tensor", "all_gather_object", "gather", "gather_object", "scatter"),
    *("scatter_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "broadcast_object_list"),
)
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)
_exchanging = Lock()
_torchs: dict[str, Any] = {}  # while steps run
_num_inside = 0
Gather = Callable[..., list[Tensor]]


@contextmanager
def default_group_is(group: dist.ProcessGroup) -> Iterator[None]:
    """Let functions of `torch.distributed` work over a group inside, where none is named."""
    global _num_inside
    with _exchanging:
        _num_inside += 1
        if _num_inside == 1:
            _torchs.update({name: getattr(dist, name) for name in _NAMES})
            vars(dist).update({name: _over_group(one) for name, one in _torchs.items()})
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)
        with _exchanging:
            _num_inside -= 1
            if not _num_inside:
                vars(dist).update(_torchs)


@cache
def _over_group(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(function).parameters

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        group = _group.get()
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if group is None or given.get("group") is not None:
            return function(*args, **kwargs)
        for name in {"src", "dst"} & parameters.keys():
            if given.get(f"group_{name}") is None:
                given[name] = dist.get_global_rank(group, given.get(name) or 0)
        return function(**given | {"group": group})

    return called


class MetricGroups:
    """Lets the metrics in a module gather over a group until `restore`.

    Args:
        module: Module whose metrics without a group and a gathering function of their own are
            changed. Metrics that are not submodules cannot be found.
        group: Process group of the data-parallel ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        gather = _GatherOver(group)
        self._changed = [
            part
            for part in module.modules()
            if isinstance(part, Metric) and part.process_group is None and part.dist_sync_fn is None
        ]
        for metric in self._changed:
            metric.dist_sync_fn = gather

    def restore(self) -> None:
        """Give the metrics back as they were."""
        for metric in self._changed:
            metric.dist_sync_fn = None
        self._changed = []


class _GatherOver:
    """Gathers a metric's state over a group, also in copies; when unpickled, over the default."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        return gather_all_tensors(result, self._group if group is None else group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_GatherOver":
        return self

    def __reduce__(self) -> tuple[Callable[[], Gather], tuple[()]]:
        return _plain_gather, ()


def _plain_gather() -> Gather:
    return gather_all_tensors
