"""The exchanges' state in a checkpoint: what all ranks share, and what each keeps for itself.

    shared        {"compressor": "TopK", "freezes_variance": False, "step": {name: 120},
                   "layout": "5f0c..."}
    of a rank     {"residual": {name: tensor}, "momentum": {...}, "owned": {name: elements}}

As many ranks with the same buffers go on with what each has kept, to the bit. Others take up means,
which lose nothing: only the average of residuals matters for what will have been sent in the end.
Older checkpoints have the means in what is shared.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.data_parallel.compression.compressor import Compressor, Exchange, State


class ReadWhenAsked(Mapping[Any, Any]):
    """Tensors by name that are made whenever somebody asks for one; no copy of all is held."""

    def __init__(self, names: Collection[Any], read: Callable[[Any], Any]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    @override
    def __getitem__(self, name: Any) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._names

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


def mean_of_ranks(
    ranks: Sequence[Mapping[str, Tensor]], parts: Sequence[Mapping[str, Tensor]] = ()
) -> ReadWhenAsked:
    """Return the mean of what ranks have kept, one tensor at a time.

    Args:
        ranks: By name what each rank has kept, in any format; the same names on each.
        parts: By name, and by rank in order, a part of one more tensor, of shape (n,), which is
            added to the mean: together they have its elements in order. {} where there is none.
    """

    def read(name: str) -> Tensor:
        first = ranks[0][name]
        dtype = torch.promote_types(first.dtype, torch.float32)
        total = first.to(dtype, copy=True)
        for rank in ranks[1:]:
            total += rank[name]
        total /= len(ranks)
        pieces = [part[name].to(total) for part in parts if name in part]
        if pieces and sum(piece.numel() for piece in pieces) == total.numel():
            total += torch.cat(pieces).view(total.shape)
        return total.to(first.dtype)

    return ReadWhenAsked(list(ranks[0]) if ranks else (), read)


_FREEZES = "freezes_variance"
_FREEZES_BEFORE = "sends_momentum"  # its name in older checkpoints
_LAYOUT = "layout"
_MEANS = ("residual", "momentum")  # over the ranks
_SETTINGS = {"compressor", "step", _FREEZES, _FREEZES_BEFORE, _LAYOUT}  # all but tensors


def shared_by_all(compressor: Compressor, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Return the state that is the same on all ranks, with tensors on the CPU; no communication."""
    shared: dict[str, Any] = {"compressor": type(compressor).__name__, "step": {}}
    shared[_FREEZES] = any(exchange.freezes_variance for exchange in exchanges)
    shared[_LAYOUT] = layout_of(exchanges)
    for exchange in exchanges:
        shared["step"].update({slot.name: exchange.step for slot in exchange.buffer.layout.slots})
        for kind, tensors in exchange.common_state().items():
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            shared.setdefault(kind, {}).update(copies)
    return shared


def own_state(exchanges: Sequence[Exchange]) -> State:
    """Return what this rank keeps by kind and parameter name, as views; no communication."""
    own: State = {}
    for exchange in exchanges:
        for kind, tensors in exchange.own_state().items():
            own.setdefault(kind, {}).update(tensors)
    return own


def with_means(shared: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a shared state with the means that it lacks, of what each rank in order has kept."""
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


def load_state(
    compressor: Compressor,
    exchanges: Sequence[Exchange],
    shared: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Take up the state of any number of ranks and any buffers; no communication.

    Of another kind of compressor only the residual is taken, which is in gradients in any case. A
    compressor that freezes Adam's second moment now and did not before is another kind.

    `shared` has means where this rank has kept nothing that fits; `own` is what it has kept for
    itself, where there were as many ranks.
    """
    freezes = any(exchange.freezes_variance for exchange in exchanges)
    is_same = shared.get("compressor") == type(compressor).__name__
    is_same &= shared.get(_FREEZES, shared.get(_FREEZES_BEFORE, freezes)) == freezes
    kinds = shared.keys() - _SETTINGS if is_same else {"residual"}
    state: dict[str, Mapping[str, Any]] = {kind: shared.get(kind, {}) for kind in kinds}
    fits = bool(own) and is_same and shared.get(_LAYOUT) == layout_of(exchanges)
    if own and fits:  # they are set to it below, and no mean is looked at
        nothing = torch.zeros(())
        state |= {kind: dict.fromkeys(own[kind], nothing) for kind in _MEANS if kind in own}
    steps = shared.get("step", {}) if is_same else {}
    for exchange in exchanges:
        names = [slot.name for slot in exchange.buffer.layout.slots]
        exchange.load(state, step=max((steps.get(name, 0) for name in names), default=0))
    if own and fits:
        for exchange in exchanges:
            exchange.load_own(own)
