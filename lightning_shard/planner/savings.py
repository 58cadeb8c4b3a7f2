"""What another option would hold less, in bytes: the advice of an out-of-memory error.

    a higher ZeRO stage          (1 - 1/N) of what it cuts, less the units that are full at a time
    activation checkpointing     from a dry run, where one can be made
    more microbatches            half of the activations in flight for twice as many
    offload                      all that it moves

Every option that saves memory is named here and nowhere else, and only to strategies that take it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.sizes import format_bytes

_CUTS = {1: "optimizer state", 2: "gradients", 3: "parameters"}  # by stage, what it shares out
_FULL_AT_ONCE = 2  # units under ZeRO stage 3: the one in use and the next


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known of a rank that is out of memory.

    Attributes:
        held: Bytes that the rank holds in a whole step.
        stage: ZeRO stage, 0 to 3.
        max_stage: The highest that its other options allow.
        num_shards: Number of ranks that share out a copy of the state, or could.
        largest_units: Bytes of the units that stage 3 has full at a time.
        options: Names of the options that its strategy takes.
        is_named_by_stage: Whether the strategy's name tells its stage: "zero2".
        checkpoints: Whether activations are computed again already.
        activations: Bytes of activations, and with "full" checkpointing; None where unknown.
        num_microbatches: Number of microbatches of a pipeline's batch; 1 without one.
        offload: What lies in host memory already.
        offloads_activations: Whether activations do.
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


def largest_units(engine: DataParallelEngine) -> int:
    """Return the bytes of the units that stage 3 would have full at a time."""
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for unit in engine.units:
        sizes[unit.is_root].append(
            sum(flat.full.numel() * flat.full.itemsize for flat in unit.flats)
        )
    return sum(sizes[True]) + sum(sorted(sizes[False])[-_FULL_AT_ONCE:])
