"""What a strategy tells an out-of-memory error: what its rank held, and what would hold less.

The error stays the one that was raised, so that Lightning's batch size finder goes on catching it;
a note is added, which Python prints below it.

How large activations are, with and without checkpointing, is told by dry runs in the middle of a
fit. Its module is in the engine's hands: parameters may show shards, blocks have hooks and
other forwards. So a copy without hooks, of full shapes and without elements, takes the step.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_shard.core._lightning import runners_of
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.core.schemes import BY_STAGE
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import HeldBytes, held, storage_bytes
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.data_parallel.recompute.recomputation import RECOMPUTED
from lightning_shard.data_parallel.torch_private import hooks_of
from lightning_shard.planning.dry_run import dry_run
from lightning_shard.planning.simulated_model import NoElements
from lightning_shard.planning.simulated_step import largest_units
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.options import option_names
from lightning_shard.strategies.trainer.announcement import what_is_held

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096
_OF_HOSTS = ("DefaultCPUAllocator", "not enough memory")  # in torch's own words
_BEGINNING = "Out of memory"


@dataclass(frozen=True, kw_only=True)
class MemoryKinds(HeldBytes):
    """Bytes of one rank within a step, by kind.

    Attributes:
        gathered: Units that are full for the moment, under ZeRO stage 3.
        communication: Full gradients that are on their way to the ranks that have them.
        others: Activations and all else that torch has allocated on the device; None where that
            cannot be told, as on a CPU.
        process: The whole process, where `others` cannot be told; None where neither can.
    """

    gathered: int
    communication: int
    activations_on_host: int = 0
    gathered_matrices: int = 0
    others: int | None = None
    process: int | None = None

    @property
    def known(self) -> int:
        """Sum of the kinds that the engine knows."""
        return self.total + self.gathered + self.communication

    def __str__(self) -> str:
        sizes: dict[str, int | None] = {
            "parameters": self.parameters,
            "gathered units": self.gathered,
            "gradients": self.gradients,
            "communication buffers": self.communication,
            "optimizer state": self.optimizer_state,
            "in host memory": self.offloaded or None,
            "activations in host memory": self.activations_on_host or None,
            "matrices gathered while an optimizer updates them": self.gathered_matrices or None,
            "activations and others": self.others,
        }
        if self.others is None:
            sizes["activations and others unknown, in a process of"] = self.process
        return ", ".join(
            f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None
        )


def memory_kinds(strategy: Any) -> MemoryKinds:
    """Return the bytes that a rank of a strategy holds now, by kind."""
    engine: DataParallelEngine = strategy.engine
    counted = held(engine, strategy.optimizers)
    gathered = storage_bytes(
        flat.full for flat in engine.flats if flat.reshards and flat.common is None
    )
    on_their_way = storage_bytes(
        one.buffer.full
        for one in engine.gradients
        if one.buffer.full is not None and not one.accumulates
    )
    found = MemoryKinds(
        parameters=counted.parameters - gathered,
        gathered=gathered,
        gradients=counted.gradients - on_their_way,
        communication=on_their_way,
        optimizer_state=counted.optimizer_state,
        offloaded=counted.offloaded,
        activations_on_host=strategy.run.steps.activations.host_bytes,
        gathered_matrices=sum(one.gathered_bytes for one in strategy.run.setup.sharded),
    )
    if engine.device.type == "cuda":
        others = torch.cuda.memory_allocated(engine.device) - found.known
        return replace(found, others=max(others, 0))
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return found
    return replace(found, process=pages * _PAGE_BYTES)


class MemoryNotes:
    """Adds notes to the out-of-memory errors of one rank."""

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
            self._batch = None
            with suppress(Exception):  # of a class that looks at what it is made of
                self._batch = apply_to_collection(batch, Tensor, _without_elements)
        return self.told(f"{kind}_step")

    def noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that notes what the rank holds at the moment in which memory ends."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    self._seen = memory_kinds(self._strategy)
                raise

        return noted

    def _description(self) -> str:
        strategy = self._strategy
        rank = f"Rank {strategy.mesh_rank} of {strategy.mesh_size}"
        engine: DataParallelEngine | None = strategy.run.engine
        if engine is None:
            return f"{rank} had not laid its model out yet: it held the module in full."
        seen, self._seen = self._seen, None
        held = seen or memory_kinds(strategy)
        advice = savings(self._situation(engine))
        less = f" What would take less here: {'; '.join(advice)}." if advice else ""
        return f"{rank} held {format_bytes(held.known)} of its model: {held}.{less}"

    def _situation(self, engine: DataParallelEngine) -> "Situation":
        strategy = self._strategy
        whole, _ = what_is_held(engine, strategy.optimizers)
        return Situation(
            held=whole,
            stage=engine.options.stage,
            max_stage=3 if engine.options.compression is None else 2,
            num_shards=strategy.shard_size,
            largest_units=largest_units(engine),
            options=option_names(type(strategy)),
            is_named_by_stage=strategy_name(strategy) in BY_STAGE,
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that torch could not allocate memory, on a device or a host."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(words in text for words in _OF_HOSTS) or ("CUDA" in text and "out of memory" in text)
    )


@contextmanager
def told_of_memory(place: str, describe: Callable[[], str]) -> Iterator[None]:
    """Add a note to out-of-memory errors that are raised inside; nested contexts add one."""
    try:
        yield
    except RuntimeError as error:
        notes = getattr(error, "__notes__", ())
        if is_out_of_memory(error) and not any(note.startswith(_BEGINNING) for note in notes):
            error.add_note(f"{_BEGINNING} in {place}. {describe()}")
        raise


def estimated_activations(strategy: Any, batch: Any) -> tuple[int, int]:
    """Return the bytes that a step keeps for backward, without and with "full" checkpointing."""
    module = plain_copy(strategy.lightning_module, strategy.engine)
    present = strategy.engine.options.activation_checkpointing
    kept = [_kept(strategy, module, batch, choice) for choice in (present, "full")]
    return kept[0], kept[1]


def _kept(strategy: Any, module: Any, batch: Any, choice: Any) -> int:
    asked = copy.copy(strategy)  # with other activations computed again
    asked.run.options = replace(asked.run.options, activation_checkpointing=choice)
    dry = dry_run(
        asked,
        module,
        batch,
        world_size=strategy.mesh_size,
        precision=str(strategy.precision_plugin.precision),
        ranks_per_node=strategy.mesh_size,
        state_values=0,
    )
    return dry.ranks[0].memory.activations + dry.ranks[0].memory.recomputed


def plain_copy(module: Any, engine: DataParallelEngine) -> Any:
    """Copy a module of a fit as it was before, without elements, hooks or trainer."""
    stand_ins = NoElements()
    formats = {param: flat.full.dtype for flat in engine.flats for param in flat.params}
    memo: dict[int, Any] = {id(one): None for one in runners_of(module)}
    for param in module.parameters():
        like = torch.empty(
            tuple(engine.full_shape(param)), dtype=formats.get(param, param.dtype), device="meta"
        )
        memo[id(param)] = nn.Parameter(stand_ins.tensor(like), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = stand_ins.tensor(buffer)
    for part in module.modules():
        memo |= {id(hooks): OrderedDict() for hooks in hooks_of(part)}
        if RECOMPUTED in vars(part):
            memo |= {id(vars(part)[RECOMPUTED]): None, id(vars(part)["forward"]): None}
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if RECOMPUTED in vars(part):
            del vars(part)[RECOMPUTED], vars(part)["forward"]
    return copied


# What another option would hold less, in bytes: the advice of an out-of-memory error.
#
#     a higher ZeRO stage          (1 - 1/N) of what it cuts, less the units that are full at a time
#     activation checkpointing     from a dry run, where one can be made
#     more microbatches            half of the activations in flight for twice as many
#     offload                      all that it moves
#
# Every option that saves memory is named here and nowhere else, and only to strategies that take
# it.

_CUTS = {1: "optimizer state", 2: "gradients", 3: "parameters"}  # by stage, what it shares out


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known of a rank that is out of memory.

    Attributes:
        max_stage: The highest that its other options allow.
        num_shards: Number of ranks that share out a copy of the state, or could.
        largest_units: Bytes of the units that stage 3 has full at a time.
        is_named_by_stage: Whether the strategy's name tells its stage: "zero2".
        activations: Bytes of activations, and with "full" checkpointing; None where unknown.
    """

    held: HeldBytes
    stage: int
    max_stage: int
    num_shards: int
    largest_units: int
    options: Collection[str]
    is_named_by_stage: bool
    checkpoints: bool
    activations: tuple[int, int] | None = None
    num_microbatches: int = 1
    offload: str | None = None
    offloads_activations: bool = False


def savings(of: Situation) -> list[str]:
    """Return what could be changed, each with what it saves, the largest saving first."""
    found: list[tuple[int, str]] = [*_of_stages(of), *_of_activations(of), *_of_offload(of)]
    found = [(saved, option) for saved, option in found if saved > 0 or saved == _UNKNOWN]
    return [_written(*one) for one in sorted(found, reverse=True)]


_UNKNOWN = -1


def _written(saved: int, option: str) -> str:
    return option if saved == _UNKNOWN else f"{option}: {format_bytes(saved)} less"


def _of_stages(of: Situation) -> list[tuple[int, str]]:
    if not (of.is_named_by_stage or "zero_stage" in of.options) or of.num_shards == 1:
        return []
    kinds = {1: of.held.optimizer_state, 2: of.held.gradients, 3: of.held.parameters}
    found, saved = [], 0
    for stage in range(of.stage + 1, of.max_stage + 1):
        saved += kinds[stage] - kinds[stage] // of.num_shards
        total = saved - of.largest_units if stage == 3 else saved
        name = f"strategy='zero{stage}'" if of.is_named_by_stage else f"zero_stage={stage}"
        found.append((total, f"{name} ({_CUTS[stage]} in shards, too)"))
    return found


def _of_activations(of: Situation) -> list[tuple[int, str]]:
    found = []
    if "activation_checkpointing" in of.options and not of.checkpoints:
        saved = _UNKNOWN if of.activations is None else of.activations[0] - of.activations[1]
        found.append((saved, "activation_checkpointing='full' (activations of blocks)"))
    if "activation_offload" in of.options and not of.offloads_activations:
        in_flight = HostActivations.in_flight_bytes
        saved = _UNKNOWN if of.activations is None else of.activations[0] - in_flight
        found.append((saved, "activation_offload=True (activations in host memory)"))
    if of.num_microbatches > 1:
        double = f"num_microbatches={2 * of.num_microbatches}"
        found.append((_UNKNOWN, f"{double} (about half of the activations, but under 'gpipe')"))
    half = _UNKNOWN if of.activations is None else of.activations[0] // 2
    found.append((half, "half the batch size, with accumulate_grad_batches twice as large"))
    return found


def _of_offload(of: Situation) -> list[tuple[int, str]]:
    if "offload" not in of.options or of.stage == 0 or of.offload == "parameters":
        return []
    gradients = of.held.gradients if of.stage > 1 else 0
    shards = of.held.optimizer_state + gradients
    found = [(shards, "offload='optimizer' (state and gradients in host memory)")]
    if of.stage == 3:
        total = shards + of.held.parameters
        found.append((total, "offload='parameters' (shards, too)"))
    return [one for one in found if "optimizer" not in one[1] or of.offload is None]
