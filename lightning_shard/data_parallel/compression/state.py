"""The exchanges' state in a checkpoint: by parameter name, whatever the ranks and buffers.

    {"compressor": "TopK", "freezes_variance": False, "step": {name: 120},
     "residual": {name: tensor}, "momentum": {...}}

A residual is what is still to be sent, on average over the ranks: the average of what each has
kept of its gradients and what owners have kept of their segments. Every rank takes the same one
up, since only the average matters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_shard.data_parallel.compression.compressor import Compressor, Exchange

_FREEZES = "freezes_variance"
_FREEZES_BEFORE = "sends_momentum"  # its name in older checkpoints
_SETTINGS = {"compressor", "step", _FREEZES, _FREEZES_BEFORE}  # all but the kinds of tensors


def full_state(
    compressor: Compressor, exchanges: Sequence[Exchange], *, keep: bool
) -> dict[str, Any]:
    """Bring the state together, one buffer at a time; each rank must call.

    Args:
        compressor: The compressor that has made the exchanges.
        exchanges: Exchanges of all buffers, in the same order on every rank.
        keep: Whether this rank gets the state.

    Returns:
        The state, with tensors on the CPU; {} on ranks that do not get it.
    """
    full: dict[str, Any] = {"compressor": type(compressor).__name__, "step": {}}
    full[_FREEZES] = any(exchange.freezes_variance for exchange in exchanges)
    for exchange in exchanges:
        state = exchange.state()
        if not keep:
            continue
        full["step"].update({slot.name: exchange.step for slot in exchange.buffer.layout.slots})
        for kind, tensors in state.items():
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            full.setdefault(kind, {}).update(copies)
    return full if keep else {}


def load_full_state(
    compressor: Compressor, exchanges: Sequence[Exchange], full: Mapping[str, Any]
) -> None:
    """Take up the state of any number of ranks and any buffers; no communication.

    Of another kind of compressor only the residual is taken, which is in gradients in any case. A
    compressor that freezes Adam's second moment now and did not before is another kind, and has
    its warm-up.
    """
    freezes = any(exchange.freezes_variance for exchange in exchanges)
    is_same = full.get("compressor") == type(compressor).__name__
    is_same &= full.get(_FREEZES, full.get(_FREEZES_BEFORE, freezes)) == freezes
    kinds = full.keys() - _SETTINGS if is_same else {"residual"}
    state = {kind: full.get(kind, {}) for kind in kinds}
    steps = full.get("step", {}) if is_same else {}
    for exchange in exchanges:
        names = [slot.name for slot in exchange.buffer.layout.slots]
        exchange.load(state, step=max((steps.get(name, 0) for name in names), default=0))
