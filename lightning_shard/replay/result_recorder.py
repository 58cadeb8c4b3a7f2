"""Notes what collectives give this rank, beneath everybody who calls them.

    this package, Lightning, user code ──> torch.distributed ──> ProcessGroup.allreduce ──> Gloo
                                                                  noted here

The methods of c10d's groups are patched while a fit runs. Calls of the thread that trains are
noted, and those of autograd's own threads, which run hooks of a backward pass on a GPU; those of
other threads are not, whose order is chance. What calls from C++ (functional collectives, DTensor)
does not pass here; the recorded strategies have none.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import Work
from typing_extensions import override

from lightning_shard.backends.debug_wrapper import DebugGroup
from lightning_shard.backends.group_handle import GroupHandle
from lightning_shard.data_parallel.torch_private import in_backward
from lightning_shard.replay.tape import WITHOUT_RESULT, Result, copies

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}


class ResultRecorder:
    """Keeps the results of calls of the thread that has entered `noting`, and of its backward.

    Attributes:
        results: The calls since `clear`, each with its result once it has been waited for.
    """

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._is_paused = False
        self._is_on: Callable[[], bool] = bool
        self._thread = 0

    def clear(self) -> None:
        """Forget what was noted."""
        self.results = []

    @contextmanager
    def noting(self, is_on: Callable[[], bool]) -> Iterator[None]:
        """Note calls inside, whenever `is_on` says so."""
        self._thread, self._is_on = threading.get_ident(), is_on
        with ExitStack() as patches:
            for name, operation in _OPERATIONS.items():
                method = getattr(dist.ProcessGroup, name, None)  # torch has renamed some
                if method is not None:
                    noted = self._noted(method, operation)
                    patches.enter_context(patch.object(dist.ProcessGroup, name, noted))
            posted = self._posted(GroupHandle._post)
            patches.enter_context(patch.object(GroupHandle, "_post", posted))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside, which a replay does not do."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _is_noting(self) -> bool:
        is_ours = threading.get_ident() == self._thread or in_backward()
        return not self._is_paused and is_ours and self._is_on()

    def _noted(self, method: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if not self._is_noting():
                return method(group, *args, **kwargs)
            written = [] if operation in WITHOUT_RESULT else (args or tuple(kwargs.values()))[0]
            result = self._begin(operation)
            return _followed(method(group, *args, **kwargs), result, written)

        return noted

    def _posted(self, post: Callable[..., Any]) -> Callable[..., Any]:
        def posted(
            group: GroupHandle, op: str, inputs: Any, outputs: Any = (), **options: Any
        ) -> Any:
            if not self._is_noting() or isinstance(group, DebugGroup):
                return post(group, op, inputs, outputs, **options)
            written = [] if op in WITHOUT_RESULT else options.get("results") or outputs
            result = self._begin(op)
            return _followed(post(group, op, inputs, outputs, **options), result, written)

        return posted

    def _begin(self, operation: str) -> Result:
        self.results.append(Result(operation=operation))
        return self.results[-1]


def _followed(work: Any, result: Result, written: Any) -> Any:
    if isinstance(work, Work):
        return _FollowedWork(work, result, written)
    result.tensors = copies(written)
    return work


class _FollowedWork(Work):
    """The handle of a call whose result is copied once the caller has waited for it."""

    def __init__(self, work: Work, result: Result, written: Any) -> None:
        super().__init__()
        self._work, self._result, self._written = work, result, written

    def _finish(self) -> None:
        if self._result.tensors is None:
            self._result.tensors = copies(self._written)
        self._written = ()

    @override
    def wait(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = self._work.wait(*args, **kwargs)
        self._finish()
        return done

    @override
    def synchronize(self) -> None:
        self._work.synchronize()
        self._finish()

    @override
    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        if done and self._work.is_success():
            self._finish()
        return done

    @override
    def is_success(self) -> bool:
        return bool(self._work.is_success())

    @override
    def exception(self) -> Any:
        return self._work.exception()

    @override
    def result(self) -> Any:
        return self._work.result()

    @override
    def get_future(self) -> Any:
        return self._work.get_future()

    @override
    def source_rank(self) -> int:
        return int(self._work.source_rank())

    @override
    def _source_rank(self) -> int:
        return int(self._work._source_rank())
