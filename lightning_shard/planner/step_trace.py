"""One step of one rank, without elements: what it keeps, has at most, moves and sends.

    forward  ▁▂▃▄▅▆  backward  ▆█▅▄▃▂▁
              saved            most

A dry run says what is saved for backward. Here the counter of all live tensors runs beside it, so
that what lives for a moment counts, too: the gradient of the logits is often the largest of all.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_shard.data_parallel.torch_private import TorchDispatchMode, storage_key
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.batch_reading import BatchReader
from lightning_shard.pipeline_parallel.microbatches import Microbatch, split_batch
from lightning_shard.planner.description import WorldOptions
from lightning_shard.planner.dry_run import apart
from lightning_shard.planner.no_elements import NoElements
from lightning_shard.planner.simulated_model import SimulatedModel, loss_of
from lightning_shard.planner.simulated_rank import SimulatedRank


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is entered.

        op ──> result ──> its storage is alive until nobody has it
                          alive  ▁▃▅▇█▇▅▃     most: what an allocator must have had at one time

    It sees real tensors and those without elements alike, so that a prediction and its measurement
    are made by the same counter. What an operation allocates inside and frees before it returns
    (workspace of a kernel) is not seen, nor is what an allocator rounds up.

    Attributes:
        alive: Bytes of such storages now.
        most: The most that were alive at one time.
        moved: Bytes of arguments and results of operations that compute, each once an operation:
            what has gone through memory where nothing is fused. Matrix products, attention and
            convolutions do not count: their time is that of their arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = self.moved = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note the storages of its results."""
        result = func(*args, **(kwargs or {}))
        results, given = _tensors(result), _tensors((args, kwargs))
        keys = {storage_key(one) for one in given}
        for one in results:
            if storage_key(one) not in keys:  # else a view, or written in place
                self._note(one)
        is_arithmetic = getattr(func, "overloadpacket", None) in flop_registry
        if not is_arithmetic and any(storage_key(one) not in keys for one in results):
            self.moved += sum(map(_num_bytes, [*given, *results]))
        return result

    def _note(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper, whose own tensors are seen
            return
        key, size = storage_key(tensor), storage.nbytes()
        if key not in self._known:
            self._known[key] = size
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.alive -= self._known.pop(key, 0)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in values, of a sparse one those that it consists of."""
    found = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [
        part
        for one in found
        for part in ((one._indices(), one._values()) if one.is_sparse else (one,))
    ]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What one rank's forward and backward of one batch take.

    Attributes:
        saved: Bytes that forward keeps for backward.
        most: The most bytes that are alive at one time, of what the step makes itself: activations,
            what is computed again, and what lives for a moment. Not parameters, nor gradients of
            parameters.
        moved: Bytes that operations of forward and backward read and write, unfused, but for
            matrix products, attention and convolutions.
        sent: Bytes that this rank sends its tensor-parallel peers.
    """

    saved: int
    most: int
    moved: int
    sent: int


def trace_step(
    module: nn.Module,
    batch: Any,
    options: WorldOptions,
    *,
    dtype: torch.dtype | None = None,
    left_out: tuple[object, ...] = (),
) -> StepTrace:
    """Run a step of a module, in no pipeline, on one simulated rank.

    Args:
        module: The full module, with parameters on any device; it is not changed.
        batch: Batch of the rank, of which only shapes count.
        options: Options of the simulated world.
        dtype: Format of the parameters; None leaves each its own.
        left_out: Objects that the module refers to and its copy must not.

    Raises:
        ConfigError: The options cut the model into stages, or the step asks for elements.
    """
    if options.cut is not None:
        raise ConfigError("A step is traced on one rank, but the options have a pipeline.")
    stand_ins = NoElements()
    (content,) = split_batch(stand_ins.batch(batch), 1, BatchReader("fields"))
    with apart():
        copied = stand_ins.module(module, dtype=dtype, left_out=left_out)
        model = SimulatedModel(copied.train(), options)
        rank = SimulatedRank(0, model)
        rank.begin_step()
        with rank.in_step():
            rank.train_full(content)  # apart: to count what is saved keeps it alive
        rank.count()
        sent = rank.sent["tp"]
        live = _traced(model, rank, content)
    return StepTrace(
        saved=rank.saved[0, content.size].total, most=live.most, moved=live.moved, sent=sent
    )


def _traced(model: SimulatedModel, rank: SimulatedRank, batch: Microbatch) -> LiveBytes:
    """Run a step and count what is alive in it; the engine has its gradients from a step before."""
    rank.begin_step()
    live = LiveBytes()
    with rank.in_step(), live:
        loss = loss_of(model.step(batch))
        with rank.engine.backward():
            loss.backward()  # type: ignore[no-untyped-call]
    return live
