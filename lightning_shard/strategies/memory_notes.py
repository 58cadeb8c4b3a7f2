"""What a strategy tells an out-of-memory error: what its rank held, and what would hold less."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory_kinds import MemoryKinds, kinds_of
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.planner.savings import Situation, largest_units, savings
from lightning_shard.sizes import format_bytes
from lightning_shard.strategies.flat_options import option_names
from lightning_shard.strategies.names import strategy_name
from lightning_shard.trainer.activation_estimate import estimated_activations
from lightning_shard.trainer.announcement import what_is_held
from lightning_shard.trainer.out_of_memory import is_out_of_memory, told_of_memory

_BY_STAGE = ("shard_ddp", "zero1", "zero2", "zero3")


def memory_kinds(strategy: Any) -> MemoryKinds:
    """Return the bytes that this rank holds now, by kind: a method of strategies."""
    return kinds_of(
        strategy.engine,
        strategy.optimizers,
        activations_on_host=strategy._activations.host_bytes,
        gathered_matrices=sum(one.gathered_bytes for one in strategy._sharded),
    )


class MemoryNotes:
    """Adds notes to the out-of-memory errors of one rank.

    Args:
        strategy: The `DataParallelStrategy` whose steps run.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._batch: Any = None  # of the last training step, without elements
        self._seen: MemoryKinds | None = None  # where an error was raised, before anything is freed

    def told(self, place: str) -> AbstractContextManager[None]:
        """Make the context in which `place` runs, such as "backward"."""
        return told_of_memory(place, self._description)

    def running(self, kind: str, batch: Any) -> AbstractContextManager[None]:
        """Make the context in which a step of a kind runs on a batch."""
        if kind == "training":
            self._batch = apply_to_collection(batch, Tensor, _without_elements)
        return self.told(f"{kind}_step")

    def noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that notes what the rank holds at the moment in which memory ends."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    self._seen = self._strategy.memory_kinds()
                raise

        return noted

    def _description(self) -> str:
        strategy = self._strategy
        rank = f"Rank {strategy.mesh_rank} of {strategy.mesh_size}"
        engine: DataParallelEngine | None = strategy.present_engine
        if engine is None:
            return f"{rank} had not laid its model out yet: it held the module in full."
        seen, self._seen = self._seen, None
        held = seen or strategy.memory_kinds()
        advice = savings(self._situation(engine))
        less = f" What would take less here: {'; '.join(advice)}." if advice else ""
        return f"{rank} held {format_bytes(held.known)} of its model: {held}.{less}"

    def _situation(self, engine: DataParallelEngine) -> Situation:
        strategy = self._strategy
        whole, _ = what_is_held(engine, strategy.optimizers)
        return Situation(
            held=whole,
            stage=engine.options.stage,
            max_stage=3 if engine.options.compression is None else 2,
            num_shards=strategy.shard_size,
            largest_units=largest_units(engine),
            options=option_names(type(strategy)),
            is_named_by_stage=strategy_name(strategy) in _BY_STAGE,
            checkpoints=engine.options.activation_checkpointing is not None,
            activations=self._activations(engine),
            offload=engine.options.offload,
            offloads_activations=engine.options.activation_offload,
            num_microbatches=max([one.num_parts for one in strategy.dimensions], default=1),
        )

    def _activations(self, engine: DataParallelEngine) -> tuple[int, int] | None:
        """Estimate the activations; None where no step can be taken on a copy of the module."""
        if self._batch is None or not isinstance(engine.split, Unsplit):
            return None
        with suppress(Exception):  # the error that is told of must not be hidden by another
            return estimated_activations(self._strategy, self._batch)
        return None


def _without_elements(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
