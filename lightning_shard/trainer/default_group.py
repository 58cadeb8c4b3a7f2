"""In a step, what `torch.distributed` is asked without a group is asked of ranks of other samples.

    dist.get_world_size()   dist.get_rank()   dist.all_reduce(n)   dist.broadcast(x, src=0)

The default group has all processes, of which those of one model are given the same samples: a sum
over it would count each of them several times. Calls that name a group are left alone. The
functions are exchanged while a step runs, and what runs on other threads then is left alone, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from inspect import signature
from threading import Lock
from typing import Any

import torch.distributed as dist

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
