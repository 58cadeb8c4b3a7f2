"""The candidates of a search: every way to lay a model out on so many ranks, as options.

    ranks = pp x dp x tp      tp within a node, pp at most one stage a block, dp what is left
    dp > 1                    ZeRO stage 0 to 3, without a pipeline also with offload
    pp > 1                    schedule, microbatches
    all                       samples of a microbatch, activation checkpointing and offload

What changes the result of a step (local and asynchronous SGD, compression) is no candidate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from math import isqrt
from typing import Any, Literal

from lightning_shard.core.schemes import BY_STAGE, SCHEMES
from lightning_shard.data_parallel.options import Offload

Checkpointing = Literal["full", "selective"] | None


def strategy_class(name: str) -> Any:
    """Return a strategy's class by its name: strategies import this room, for their dry runs."""
    package, _, _ = __name__.partition(".planning.")  # on whichever Lightning this room is built
    return getattr(import_module(package), name)


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """One way to train: sizes of the axes and options."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    schedule: str
    microbatch: int
    num_microbatches: int
    checkpointing: Checkpointing = None
    offload: Offload | None = None
    activation_offload: bool = False
    rounds: int = 1

    @property
    def accumulated(self) -> int:
        """Number of batches of a loader whose gradients make one step."""
        return self.rounds if self.pp > 1 else self.num_microbatches

    @property
    def batch_size(self) -> int:
        """Samples of a batch of each data-parallel rank's loader."""
        return self.microbatch * (self.num_microbatches if self.pp > 1 else 1)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages that each rank of the pipeline has."""
        return 2 if self.schedule.startswith("interleaved") else 1

    @property
    def uses_host(self) -> bool:
        """Whether anything lies in host memory."""
        return self.offload is not None or self.activation_offload

    @property
    def strategy(self) -> str:
        """Name of the strategy, without offload's suffix."""
        if self.pp > 1:
            return "pipeline_parallel" if self.tp == self.dp == 1 else "hybrid_parallel"
        return "tensor_parallel" if self.tp > 1 else BY_STAGE[self.zero_stage]

    @property
    def class_name(self) -> str:
        """Name of the strategy's class in `lightning_shard`."""
        return SCHEMES[self.strategy].class_name

    @property
    def low_precision(self) -> dict[str, str]:
        """Return the options by which its ranks would send fewer bits to average and to gather."""
        found = {}
        if self.zero_stage and self.strategy != "tensor_parallel" and self.offload != "parameters":
            found["quantized_gathers"] = "int8"
        return found | ({"compression": "int4"} if self.strategy in BY_STAGE else {})

    def options(self, plan: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the strategy's arguments, `plan` being that of the layers to split."""
        found: dict[str, Any] = {}
        if self.checkpointing is not None:
            found["activation_checkpointing"] = self.checkpointing
        if self.offload is not None:
            found["offload"] = self.offload
        if self.activation_offload:
            found["activation_offload"] = True
        if self.strategy in BY_STAGE:
            return found
        if self.strategy == "tensor_parallel":
            found |= {"tensor_parallel_size": self.tp, "zero_stage": self.zero_stage}
        elif self.strategy == "hybrid_parallel":
            found |= {"pipeline_parallel_size": self.pp, "tensor_parallel_size": self.tp}
            found |= {"data_parallel_size": -1, "zero_stage": self.zero_stage}
        if self.tp > 1 and plan is not None:
            found["plan"] = plan
        if self.pp > 1:
            found |= {"schedule": self.schedule, "num_microbatches": self.num_microbatches}
        return found

    def __str__(self) -> str:
        sizes = [(name, size) for name, size in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp))]
        parts = [" ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"]
        if self.strategy not in BY_STAGE and self.zero_stage:
            parts.append(f"ZeRO {self.zero_stage}")
        if self.schedule:
            parts.append(f"{self.schedule} of {self.num_microbatches}")
        elif self.num_microbatches > 1:
            parts.append(f"{self.num_microbatches} accumulated")
        if self.rounds > 1:
            parts.append(f"{self.rounds} accumulated")
        parts.append(f"{self.microbatch} a forward")
        if self.checkpointing:
            parts.append(f"{self.checkpointing} checkpointing")
        if self.offload:
            parts.append(f"{self.offload} offloaded")
        if self.activation_offload:
            parts.append("activations offloaded")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The bounds of a search."""

    num_ranks: int
    ranks_per_node: int
    num_blocks: int
    global_batch: int
    tp_sizes: tuple[int, ...] = (1,)
    checkpointing: tuple[Checkpointing, ...] = (None, "selective", "full")
    batch_size: int | None = None
    min_microbatch: int = 1

    def candidates(self) -> Iterator[PlanCandidate]:
        """Yield every candidate."""
        for pp, dp, tp in self._meshes():
            for cut in self._cuts(pp, dp):
                if cut["microbatch"] < self.min_microbatch:
                    continue
                for choice in self.checkpointing:
                    made = PlanCandidate(
                        pp=pp, dp=dp, tp=tp, zero_stage=0, schedule="", checkpointing=choice, **cut
                    )
                    for plain in _on_mesh(made, self.num_blocks):
                        yield plain
                        yield replace(plain, activation_offload=True)

    def _cuts(self, pp: int, dp: int) -> Iterator[dict[str, Any]]:
        """Yield the ways to cut a data-parallel rank's samples of a step."""
        samples = self.global_batch // dp
        if self.batch_size is None:
            for microbatch in _divisors(samples):
                yield {"microbatch": microbatch, "num_microbatches": samples // microbatch}
            return
        rounds, rest = divmod(samples, self.batch_size)
        if rest or not rounds:
            return
        if pp == 1:
            yield {"microbatch": self.batch_size, "num_microbatches": rounds}
            return
        for microbatch in _divisors(self.batch_size):
            parts = self.batch_size // microbatch
            yield {"microbatch": microbatch, "num_microbatches": parts, "rounds": rounds}

    def _meshes(self) -> Iterator[tuple[int, int, int]]:
        for tp in self.tp_sizes:
            if self.num_ranks % tp:
                continue
            for pp in _divisors(self.num_ranks // tp):
                dp = self.num_ranks // tp // pp
                if (pp == 1 or pp <= self.num_blocks) and self.global_batch % dp == 0:
                    yield pp, dp, tp


def _on_mesh(plain: PlanCandidate, num_blocks: int) -> Iterator[PlanCandidate]:
    for stage in range(4) if plain.dp > 1 else (0,):
        made = replace(plain, zero_stage=stage)
        if made.pp > 1:
            yield from _schedules(made, num_blocks)
            continue
        yield made
        if made.tp == 1 and stage in (2, 3):
            yield replace(made, offload="optimizer" if stage == 2 else "parameters")


def _schedules(made: PlanCandidate, num_blocks: int) -> Iterator[PlanCandidate]:
    if made.num_microbatches < made.pp:  # most ranks would wait most of the time
        return
    yield replace(made, schedule="1f1b")
    in_rounds = made.num_microbatches % made.pp == 0
    if in_rounds and 2 * made.pp <= num_blocks:
        yield replace(made, schedule="interleaved_1f1b")


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
