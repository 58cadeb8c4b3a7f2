"""The exchanges' state in a checkpoint: what all ranks share, and what each keeps for itself.

    shared        {"compressor": "TopK", "freezes_variance": False, "step": {name: 120},
                   "layout": "5f0c...", "residual": {name: tensor}, "momentum": {...}}
    of a rank     {"residual": {name: tensor}, "momentum": {...}, "owned": {name: elements}}

As many ranks with the same buffers go on with what each has kept, to the bit. Others take up the
shared state: a residual in it is what is still to be sent, on average over the ranks, the average
of what each has kept of its gradients and what owners have kept of their segments. Only the
average matters for what will have been sent in the end, so that nothing is lost.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from lightning_shard.data_parallel.compression.compressor import Compressor, Exchange, State
from lightning_shard.data_parallel.read_when_asked import mean_of_ranks

_FREEZES = "freezes_variance"
_FREEZES_BEFORE = "sends_momentum"  # its name in older checkpoints
_LAYOUT = "layout"
_MEANS = ("residual", "momentum")  # over the ranks
_SETTINGS = {"compressor", "step", _FREEZES, _FREEZES_BEFORE, _LAYOUT}  # all but tensors


def full_state(
    compressor: Compressor, exchanges: Sequence[Exchange], *, keep: bool, means: bool = True
) -> dict[str, Any]:
    """Bring the shared state together, one buffer at a time; each rank must call.

    Args:
        compressor: The compressor that has made the exchanges.
        exchanges: Exchanges of all buffers, in the same order on every rank.
        keep: Whether this rank gets the state.
        means: Whether the means of what ranks keep are in it. Without them nothing is sent, and
            whoever loads it has what each rank has kept, see `with_means`.

    Returns:
        The state, with tensors on the CPU; {} on ranks that do not get it.
    """
    full: dict[str, Any] = {"compressor": type(compressor).__name__, "step": {}}
    full[_FREEZES] = any(exchange.freezes_variance for exchange in exchanges)
    full[_LAYOUT] = layout_of(exchanges)
    for exchange in exchanges:
        state = exchange.state() if means else exchange.common_state()
        if not keep:
            continue
        full["step"].update({slot.name: exchange.step for slot in exchange.buffer.layout.slots})
        for kind, tensors in state.items():
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            full.setdefault(kind, {}).update(copies)
    return full if keep else {}


def own_state(exchanges: Sequence[Exchange]) -> State:
    """Return what this rank keeps by kind and parameter name; no communication.

    Returns:
        Views of the kept tensors, on their device.
    """
    own: State = {}
    for exchange in exchanges:
        for kind, tensors in exchange.own_state().items():
            own.setdefault(kind, {}).update(tensors)
    return own


def with_means(shared: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a shared state with the means over the ranks that it lacks, none of which is read.

    Args:
        shared: What `full_state` has returned.
        kept: What `own_state` has returned on each rank, in order.
    """
    if not shared or not kept:
        return shared
    owned = [one.get("owned", {}) for one in kept]
    means = {
        kind: mean_of_ranks([one[kind] for one in kept], owned if kind == "residual" else ())
        for kind in _MEANS
        if kind not in shared and all(kind in one for one in kept)
    }
    return {**shared, **means}


def layout_of(exchanges: Sequence[Exchange]) -> str:
    """Return a digest that is equal where ranks and buffers are: what a rank keeps fits then."""
    buffers = [
        (one.ranks.size, one.numel, one.keeps_all, [(s.name, s.offset) for s in one.layout.slots])
        for one in (exchange.buffer for exchange in exchanges)
    ]
    return blake2b(repr(buffers).encode(), digest_size=8).hexdigest()


def load_full_state(
    compressor: Compressor,
    exchanges: Sequence[Exchange],
    full: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Take up the state of any number of ranks and any buffers; no communication.

    Of another kind of compressor only the residual is taken, which is in gradients in any case. A
    compressor that freezes Adam's second moment now and did not before is another kind, and has
    its warm-up.

    Args:
        compressor: The compressor that has made the exchanges.
        exchanges: Exchanges of all buffers.
        full: The shared state.
        own: What this rank has kept for itself, where there were as many ranks; else None.
    """
    freezes = any(exchange.freezes_variance for exchange in exchanges)
    is_same = full.get("compressor") == type(compressor).__name__
    is_same &= full.get(_FREEZES, full.get(_FREEZES_BEFORE, freezes)) == freezes
    kinds = full.keys() - _SETTINGS if is_same else {"residual"}
    state: dict[str, Mapping[str, Any]] = {kind: full.get(kind, {}) for kind in kinds}
    fits = bool(own) and is_same and full.get(_LAYOUT) == layout_of(exchanges)
    if own and fits:  # they are set to it below, and no mean is looked at
        nothing = torch.zeros(())
        state |= {kind: dict.fromkeys(own[kind], nothing) for kind in _MEANS if kind in own}
    steps = full.get("step", {}) if is_same else {}
    for exchange in exchanges:
        names = [slot.name for slot in exchange.buffer.layout.slots]
        exchange.load(state, step=max((steps.get(name, 0) for name in names), default=0))
    if own and fits:
        for exchange in exchanges:
            exchange.load_own(own)
