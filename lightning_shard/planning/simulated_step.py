"""A step of simulated ranks without elements: all of a pipeline, or one, traced.

    rank 0   F0 F1 ...                          each rank goes on until it waits for a message
    rank 1         F0 F1 ..  B0                 of another

Microbatches of one size cost the same: one of them is run and counts for all, but under ZeRO stage
3, where the unsharded units depend on the order.

    forward  ▁▂▃▄▅▆  backward  ▆█▅▄▃▂▁
              saved            most

A dry run says what is saved for backward. In a trace what lives for a moment counts, too: the
gradient of the logits is often the largest.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_shard.data_parallel.torch_private import TorchDispatchMode, storage_key
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.batch_reading import BatchReader
from lightning_shard.pipeline_parallel.microbatches import Microbatch, split_batch
from lightning_shard.pipeline_parallel.schedules import Action, Schedule, StageInput
from lightning_shard.pipeline_parallel.skipped_blocks import UnknownResultError, uncompiled
from lightning_shard.pipeline_parallel.stage_run import Needed
from lightning_shard.planning.report import (
    ActivationBytes,
    Kept,
    at_once,
    peak,
)
from lightning_shard.planning.simulated_model import (
    ProductsOfGroups,
    SimulatedModel,
    loss_of,
)
from lightning_shard.planning.simulated_rank import SimulatedRank

_STEPS_OF_STAGE_3 = 2  # what is gathered ahead follows the step before


class SimulatedPipeline:
    """The ranks of one pipeline, which share a model without elements."""

    def __init__(
        self, model: SimulatedModel, schedule: Schedule, microbatches: Sequence[Microbatch]
    ) -> None:
        self._model = model
        self.ranks = [SimulatedRank(rank, model) for rank in range(schedule.num_ranks)]
        self.schedule, self.microbatches = schedule, microbatches
        sizes = [one.size for one in microbatches]
        every = model.options.engine.stage == 3
        self._weights = {  # how many microbatches each one that is run counts for
            index: 1 if every else sizes.count(size)
            for index, size in enumerate(sizes)
            if every or sizes.index(size) == index
        }
        self._made: dict[StageInput, list[Tensor]] = {}
        self._arrived: dict[StageInput, list[Tensor]] = {}
        self._needed: list[Needed | None] = []

    def run(self) -> None:
        """Run a step on every rank, up to the optimizer's."""
        with self._model.staged.batch():
            self._needed = self._needs()
        for _ in range(_STEPS_OF_STAGE_3 if self._model.options.engine.stage == 3 else 1):
            self._run_step()

    def _run_step(self) -> None:
        for rank in self.ranks:
            rank.begin_step()
        with self._model.staged.batch():
            steps = [rank.in_step() for rank in self.ranks]
            self._run_actions()
        for rank, step in zip(self.ranks, steps, strict=True):
            step.close()
            rank.hand_over()
            rank.count()

    def _run_actions(self) -> None:
        waiting = [self._chosen(rank.rank) for rank in self.ranks]
        while any(waiting):
            for rank, actions in zip(self.ranks, waiting, strict=True):
                while actions and self._act(rank, actions[0]):
                    del actions[0]

    def _chosen(self, rank: int) -> list[Action]:
        return [one for one in self.schedule.actions[rank] if one.microbatch in self._weights]

    def _needs(self) -> list[Needed | None]:
        """Return the tensors that each stage needs of earlier ones."""
        try:
            return self._probed()
        except UnknownResultError:
            self._model.staged.hint = self._model.probe(0, self.microbatches[0]).template
            return self._probed()

    def _probed(self) -> list[Needed | None]:
        """Probe each stage with the smallest and then the largest microbatch."""
        for microbatch in (self.microbatches[-1], self.microbatches[0]):
            stages = range(1, self.schedule.num_stages)
            needs = [self._model.probe(stage, microbatch).needed for stage in stages]
        if None in needs:
            raise ConfigError(
                f"The training step ended without calling the first block of stage "
                f"{needs.index(None) + 1}, expected it to call the network once, all blocks in "
                f"order."
            )
        return [None, *needs, None]  # of the first stage, and after the last

    def _act(self, rank: SimulatedRank, action: Action) -> bool:
        """Do one action; return False when its message has not come."""
        weight = self._weights[action.microbatch]
        kind = action.kind
        if kind == "F":
            done = self._forward(rank, action)
        elif kind in ("B", "I"):
            done = self._backward(rank, action)
        elif kind == "W":
            rank.backward_weights(action.stage, self.microbatches[action.microbatch])
            done = True
        elif kind.startswith("SEND"):
            message = action.output
            self._arrived[message] = self._made.pop(message)
            rank.send(self._arrived[message], weight)
            return True
        else:
            return True
        rank.count(weight)
        return done

    def _forward(self, rank: SimulatedRank, action: Action) -> bool:
        stage, _, index = action
        if stage > 0 and (stage, "F", index) not in self._arrived:
            return False
        received = self._arrived.pop((stage, "F", index)) if stage > 0 else None
        outputs = rank.forward(stage, self.microbatches[index], received, self._needed[stage + 1])
        self._hand_on(rank, action, outputs)
        return True

    def _backward(self, rank: SimulatedRank, action: Action) -> bool:
        stage, _, index = action
        is_last = stage == self.schedule.num_stages - 1
        if not is_last and (stage, "B", index) not in self._arrived:
            return False
        grads = None if is_last else self._arrived.pop((stage, "B", index))
        run = rank.backward if action.kind == "B" else rank.backward_inputs
        self._hand_on(rank, action, run(stage, self.microbatches[index], grads))
        return True

    def _hand_on(self, rank: SimulatedRank, action: Action, tensors: Sequence[Tensor]) -> None:
        """Keep tensors for their message, or give them to this rank's own stage."""
        message = action.output
        is_here = message[0] in rank.stages
        (self._arrived if is_here else self._made)[message] = [
            one.detach().requires_grad_(one.requires_grad) for one in tensors
        ]

    def peak_activations(self, rank: SimulatedRank) -> ActivationBytes:
        """Return the most bytes that a rank keeps for the backwards to come."""
        return peak(state.values() for state in self._in_flight(rank))

    def _in_flight(self, rank: SimulatedRank) -> Iterator[dict[StageInput, Kept]]:
        """Yield what is kept after each of a rank's actions, by stage and microbatch."""
        state: dict[StageInput, Kept] = {}
        for stage, kind, index in self.schedule.actions[rank.rank]:
            if kind == "F":
                size = self.microbatches[index].size
                state[stage, kind, index] = rank.saved.get((stage, size), Kept(0))
                yield state
            elif kind in ("B", "W"):
                state.pop((stage, "F", index), None)


def run_unpipelined(rank: SimulatedRank, batch: Microbatch) -> ActivationBytes:
    """Run a step of a model that is full on its rank; return what is kept for the backward."""
    rank.begin_step()
    with rank.in_step():
        rank.train_full(batch)
    rank.count()
    return at_once([rank.saved[0, batch.size]])


@contextmanager
def apart() -> Iterator[None]:
    """Restore the random streams and suppress warnings; compiled code runs as written inside."""
    products: Any = ProductsOfGroups  # which torch does not annotate
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), products(), uncompiled():
        warnings.simplefilter("ignore")  # of addresses that tensors without elements do not have
        yield


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is entered.

        op ──> result ──> its storage is alive until nobody has it
                          alive  ▁▃▅▇█▇▅▃     most: what an allocator must have had at one time

    It sees real tensors and those without elements alike. What an operation allocates inside and
    frees before it returns is not seen, nor is what an allocator rounds up.

    Attributes:
        moved: Bytes of arguments and results of operations that compute: what has gone through
            memory where nothing is fused. Matrix products, attention and convolutions do not count:
            their time is that of their arithmetic.
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
    """What one rank's forward and backward of one batch take, in bytes.

    Attributes:
        saved: What forward keeps for backward.
        most: The most that is alive at one time of what the step makes itself, which parameters and
            their gradients are not.
        moved: See `LiveBytes`.
        sent: What this rank sends its tensor-parallel peers.
    """

    saved: int
    most: int
    moved: int
    sent: int


def trace_step(model: SimulatedModel, batch: Any) -> StepTrace:
    """Run a step of a full model, in no pipeline, on one simulated rank."""
    if model.options.cut is not None:
        raise ConfigError("A step is traced on one rank, but the options have a pipeline.")
    (content,) = split_batch(batch, 1, BatchReader("fields"))
    rank = SimulatedRank(0, model)
    run_unpipelined(rank, content)  # apart: to count what is saved keeps it alive
    sent = rank.sent["tp"]
    live = _traced(model, rank, content)
    return StepTrace(
        saved=rank.saved[0, content.size].total,
        most=live.most,
        moved=live.moved,
        sent=sent,
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
