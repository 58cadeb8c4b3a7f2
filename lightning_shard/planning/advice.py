"""What low precision would bring where a plan does not fit, or waits for links.

It changes the results of a step, and so is no candidate.
"""

from collections.abc import Callable, Sequence

import torch
import yaml

from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.estimate import Estimate
from lightning_shard.planning.machine import MachineProfile
from lightning_shard.planning.report import cell
from lightning_shard.precision.policy import TRUE_DTYPES

_STATE_BYTES = 2 + 2 / 64  # of an element under AdamW in 8 bits: two codes, and scales for blocks
_BASE_BYTES = 1 / 2 + 1 / 64  # of an element in 4 bits, doubly quantised
_MUCH = 0.1  # of a step, for which a rank waits


def low_precision_advice(
    anatomy: Anatomy,
    machine: MachineProfile,
    ranks_per_node: int,
    limit: int,
    found: Sequence[Estimate],
    chosen: Estimate | None,
) -> list[str]:
    """Return what to write for low precision, and what it would bring; a line for each."""
    on_device = [one for one in found if not one.candidate.uses_host]
    if on_device and (chosen is None or chosen.candidate.uses_host):
        return _for_memory(anatomy, on_device, limit)
    return [] if chosen is None else _for_links(machine, ranks_per_node, chosen)


def _for_memory(anatomy: Anatomy, found: Sequence[Estimate], limit: int) -> list[str]:
    """Return what holds less on a device than the least that there is."""

    def line(text: str, saved: Callable[[Estimate], float]) -> str:
        sizes = [int(one.peak_bytes - saved(one)) for one in found]
        least = min(sizes)
        made = found[sizes.index(least)].candidate
        fits = "fits" if least <= limit else "is too large, too"
        return f"{text}: {cell(least)} a device with {made.strategy}, which {fits}."

    lines = []
    dtype = TRUE_DTYPES.get(anatomy.precision, torch.float32)
    state_share = _STATE_BYTES / dtype.itemsize / anatomy.state_values
    if state_share < 1:
        lines.append(
            line(
                "optimizer: {class_path: bitsandbytes.optim.AdamW8bit}",
                lambda one: (1 - state_share) * one.memory.optimizer_state,
            )
        )
    frozen, base_share = anatomy.frozen_share, _BASE_BYTES / dtype.itemsize
    if frozen:
        lines.append(
            line(
                "the frozen base with quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
                lambda one: (
                    (1 - base_share) * frozen * (one.memory.parameters + one.memory.gathered)
                ),
            )
        )
    return lines


def _for_links(machine: MachineProfile, ranks_per_node: int, one: Estimate) -> list[str]:
    """Return what sends fewer bytes between nodes, where ranks wait for them."""
    made = one.candidate
    speed = machine.bytes_per_second(inside_node=made.dp * made.tp <= ranks_per_node)
    waits = (1 - one.hidden_share) * one.sent["dp"] / speed
    options = made.low_precision
    if made.dp * made.tp <= ranks_per_node or waits < _MUCH * one.seconds or not options:
        return []
    told = yaml.safe_dump(options, default_flow_style=True, sort_keys=False).strip()
    return [
        f"init_args: {told}, since {waits / one.seconds:.0%} of a step is waiting for links "
        f"between nodes: parameters then travel in 1.03 bytes each, gradients in 0.53."
    ]
