"""The results of one rank's calls of collectives, in the order in which it made them.

    recorded     all_reduce -> 8 numbers     recv -> 4 numbers     send     recv, unfinished
    replayed     the rank makes the same calls in the same order, and is given the same results

A call that had no result, because a peer had failed, raises that. Results are noted beneath
everybody who calls collectives:

    this package, Lightning, user code ──> torch.distributed ──> ProcessGroup.allreduce ──> Gloo
                                                                  noted here

Calls of the thread that trains are noted, and those of autograd's own threads, which run hooks of a
backward pass on a GPU; the order of other threads' is chance. What calls from C++ (functional
collectives, DTensor) does not pass here; the recorded strategies have none.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_shard.backends.debug_wrapper import DebugGroup
from lightning_shard.backends.group_handle import GroupHandle
from lightning_shard.backends.python_group import COLLECTIVES
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.data_parallel.torch_private import in_backward
from lightning_shard.errors import CheckpointError, RankFailedError

WITHOUT_RESULT = ("send", "barrier", "monitored_barrier")
"""Operations that write nothing."""
_OPERATIONS = {
    **COLLECTIVES,
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "monitored_barrier": "monitored_barrier",
}


@dataclass(kw_only=True)
class Result:
    """One call and what it wrote."""

    operation: str
    tensors: list[Tensor] | None = None


@dataclass(kw_only=True)
class CallTape:
    """Results to be given out again, one after the other."""

    rank: int
    results: Sequence[Result]
    is_cut_short: bool = False
    is_playing: bool = False
    _number: int = field(default=0, init=False)

    def next(self, operation: str, written: Any) -> Callable[[], None]:
        """Take the next place on the tape, and return what writes its result."""
        targets = tensors_in(written)
        number, self._number = self._number, self._number + 1
        found = self.results[number] if number < len(self.results) else None
        if found is None and self.is_cut_short:
            found = Result(operation=operation)
        if found is None or found.operation != operation or not _fit(found.tensors, targets):
            what = "no more" if found is None else f"{found.operation} {_shapes(found.tensors)}"
            raise CheckpointError(
                f"Rank {self.rank}: the replay calls {operation} {_shapes(targets)} as operation "
                f"{number}, expected {what} as recorded: the step goes another way here. Take the "
                f"module, the strategy's options and the callbacks of the recorded run."
            )

        def deliver() -> None:
            if found.tensors is None:
                raise RankFailedError(
                    f"Rank {self.rank}: {operation}, operation {number} of the record, had no "
                    f"result: a peer had failed, or never came."
                )
            with torch.no_grad():
                for target, value in zip(targets, found.tensors, strict=True):
                    target.data.copy_(value.view_as(target))

        return deliver


def tensors_in(written: Any) -> list[Tensor]:
    """Return the tensors in any nesting of lists."""
    return [one for one in tree_leaves(written) if isinstance(one, Tensor)]


def copies(written: Any) -> list[Tensor]:
    """Return copies of the tensors in any nesting, in host memory."""
    return [host_copy(one) for one in tensors_in(written)]


def _fit(found: Sequence[Tensor] | None, targets: Sequence[Tensor]) -> bool:
    if found is None:
        return True
    return [one.numel() for one in found] == [one.numel() for one in targets]


def _shapes(tensors: Sequence[Tensor] | None) -> str:
    return str([tuple(one.shape) for one in tensors or ()])


class ResultRecorder:
    """Keeps calls of the thread in `noting`, and of its backward, with results once waited for."""

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

    def paused(self) -> AbstractContextManager[None]:
        """Note nothing inside, which a replay does not do."""
        return setting(self, _is_paused=True)

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


# The Trainer's place in a fit: how far its loops are, and what has state beside the model.
#
# It is taken when a batch has been fetched and nothing of it has begun, and set at the same moment.


def take_place(trainer: "pl.Trainer") -> dict[str, Any]:
    """Return the place of a fitting Trainer, as plain values; no hook of a checkpoint runs."""
    owner: Any = trainer
    state = {
        "loops": trainer.fit_loop.state_dict(),
        "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "callbacks": {one.state_key: one.state_dict() for one in owner.callbacks},
        "precision": trainer.precision_plugin.state_dict(),
    }
    copied: dict[str, Any] = tree_map_only(Tensor, host_copy, deepcopy(state))
    return copied


def set_place(trainer: "pl.Trainer", place: dict[str, Any]) -> None:
    """Bring a Trainer to a place, inside its loops; callbacks that it has not are left out."""
    owner: Any = trainer
    loop = trainer.fit_loop
    loop.load_state_dict(deepcopy(place["loops"]))
    loop.on_iteration_done()  # nothing is resumed: the loops are where they would be
    loop.restarting = False
    for config, state in zip(trainer.lr_scheduler_configs, place["schedulers"], strict=True):
        config.scheduler.load_state_dict(deepcopy(state))
    for callback in owner.callbacks:
        if state := place["callbacks"].get(callback.state_key):
            callback.load_state_dict(deepcopy(state))
    if place["precision"]:
        trainer.precision_plugin.load_state_dict(place["precision"])


@torch.no_grad()
def set_buffers(module: "pl.LightningModule", buffers: dict[str, Tensor]) -> None:
    """Set the module's buffers."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def full_copies(engine: DataParallelEngine) -> list[Tensor]:
    """Return copies of the full parameters that a rank holds beside its shards, by buffer."""
    return [host_copy(flat.full) for flat in engine.flats if _is_beside(flat)]


@torch.no_grad()
def set_full(engine: DataParallelEngine, copies: Sequence[Tensor]) -> None:
    """Set what `full_copies` has copied."""
    flats = [flat for flat in engine.flats if _is_beside(flat)]
    for flat, copied in zip(flats, copies, strict=True):
        flat.full.copy_(copied)


def _is_beside(flat: FlatParameters) -> bool:
    return flat.stage in (1, 2)
