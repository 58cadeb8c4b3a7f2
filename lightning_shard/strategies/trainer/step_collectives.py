"""`self.all_gather(...)` and `strategy.reduce`: tensors of all data-parallel ranks together.

    forward    x of rank r            ──> [x of rank 0, x of rank 1, ...] on every rank
    backward   sum over ranks of the  <── each rank's own gradient of its own loss
               gradients for x of r

Parameters' gradients are averaged over the ranks afterwards. So where every rank computes the same
loss of all samples, the sum of W equal gradients and the mean over W ranks cancel: the result is
the gradient on a single device that has all samples, as in torch's `all_gather`.

In a step, what `torch.distributed` and torchmetrics ask without a group is asked of the ranks of
other samples: of the default group's processes those of one model are given the same samples, and a
sum would count each several times. `dist.group.WORLD` is that group, too, since functions such as
torchmetrics' `gather_all_tensors` name it. Both are exchanged while a step runs; calls that name
another group, and what runs on other threads then, are left alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from inspect import signature
from threading import Lock
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.regions import gather_to_region

_CALLS = (
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
    """Let `torch.distributed` work over a group inside, where none is named or the default is."""
    global _num_inside
    with _exchanging:
        _num_inside += 1
        if _num_inside == 1:
            _torchs.update({name: getattr(dist, name) for name in (*_CALLS, "group")})
            over_group = {name: _over_group(_torchs[name]) for name in _CALLS}
            vars(dist).update(over_group, group=_DefaultGroup())
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)
        with _exchanging:
            _num_inside -= 1
            if not _num_inside:
                vars(dist).update(_torchs)


class _DefaultGroup:
    """Stands for `torch.distributed.group`, whose `WORLD` is the group of the step that asks."""

    def __getattr__(self, name: str) -> Any:
        group = _group.get() if name == "WORLD" else None
        return getattr(_torchs["group"], name) if group is None else group


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
    """Lets the metrics in a module gather over a group until `restore`."""

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


class _GatherOver(SharedByCopies):
    """Gathers a metric's state over a group, also in copies; when unpickled, over the default."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        return gather_all_tensors(result, self._group if group is None else group)

    def __reduce__(self) -> tuple[Callable[[], Gather], tuple[()]]:
        return _plain_gather, ()


def _plain_gather() -> Gather:
    return gather_all_tensors


_MAX_DIMS = 15  # whose sizes are compared
_NAMES: dict[str, ReduceOpName] = {"mean": "avg", **{name: name for name in get_args(ReduceOpName)}}
_BY_OP: list[tuple[Any, ReduceOpName]] = [
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "avg"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
]


def gathered(tensor: Tensor, collectives: Collectives, *, sync_grads: bool) -> Tensor:
    """Stack the tensors of all ranks.

    Args:
        tensor: Shape (...), the same on each rank. A placeholder of another pipeline stage is one
            on every rank, and is gathered without a message.
        collectives: Group of W ranks, each of which must call.
        sync_grads: Whether gradients flow back to the ranks.

    Returns:
        Shape (W, ...).
    """
    if is_placeholder(tensor):
        return torch.stack([tensor] * collectives.size)
    _check_shapes(tensor, collectives)
    with nullcontext() if sync_grads else torch.no_grad():
        return gather_to_region(tensor.unsqueeze(0), 0, collectives)


@torch.no_grad()
def _check_shapes(tensor: Tensor, collectives: Collectives) -> None:
    sizes = [tensor.ndim, *tensor.shape[:_MAX_DIMS]]
    own = torch.zeros(1 + _MAX_DIMS, dtype=torch.int64)
    own[: len(sizes)] = torch.tensor(sizes)
    own = own.to(tensor.device)
    every = own.new_empty(collectives.size * len(own))
    collectives.all_gather(every, own).wait()
    rows = every.view(collectives.size, -1).tolist()
    for rank, row in enumerate(rows):
        if row != rows[0]:
            expected, got = (tuple(one[1 : 1 + one[0]]) for one in (rows[0], row))
            raise ConfigError(
                f"all_gather got a tensor of shape {got} on rank {rank} and of shape {expected} on "
                f"rank 0 of the data-parallel ranks; expected one shape. A last batch that is "
                f"smaller on some ranks is what usually differs: let the loader leave it out "
                f"(drop_last=True), or pad the tensor."
            )


def reduce_op_name(op: ReduceOp | str | None) -> ReduceOpName:
    """Return the name in `Collectives` of one of Lightning's reductions, or raise ConfigError."""
    if op is None:
        return "sum"
    if isinstance(op, str):
        if op.lower() in _NAMES:
            return _NAMES[op.lower()]
    else:
        for known, name in _BY_OP:
            if op == known:
                return name
    raise ConfigError(f"Cannot reduce by {op!r}; expected one of {', '.join(_NAMES)}.")


def agreed(
    decision: bool, collectives: Collectives, device: torch.device, op: ReduceOpName
) -> bool:
    """Return whether all ranks say so ("min"), or any of them ("max"); each rank must call."""
    flag = torch.tensor(int(decision), device=device)
    collectives.all_reduce(flag, op).wait()
    return bool(flag)


def reduced(tensor: Tensor, reduce_op: Any, collectives: Collectives) -> Tensor:
    """Return a reduced copy; averages of integers are floats. Each rank must call."""
    op = reduce_op_name(reduce_op)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if op == "avg" and not (result.is_floating_point() or result.is_complex()):
        result = result.float()
    collectives.all_reduce(result, op).wait()
    return result
