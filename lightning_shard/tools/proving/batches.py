"""The ranks' batches, joined into the batch of one device, and taken apart.

    rank 0   x (4, 8)  y (4,)                       one device   x (8, 8)  y (8,)
    rank 1   x (4, 8)  y (4,)      ── joined ──>

Tensors and arrays are joined along their first dimension, lists of strings and the like one after
the other; what is equal on all ranks stays as it is.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import ConfigError

Join = Callable[[list[Any]], Any]


def join_batches(batches: Sequence[Any]) -> Any:
    """Return one batch of the samples of several."""
    first = batches[0]
    if len(batches) == 1:
        return copy.deepcopy(first)
    if isinstance(first, Tensor):
        return _joined_tensors(batches)
    if isinstance(first, Mapping):
        joined = {key: join_batches([one[key] for one in batches]) for key in first}
        return joined if type(first) is dict else _like(first, joined)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_batches(parts) for parts in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        if first and all(isinstance(one, str | bytes) for one in first):
            return type(first)(item for one in batches for item in one)
        return type(first)(join_batches(parts) for parts in zip(*batches, strict=True))
    if all(type(one) is type(first) and one == first for one in batches):
        return first
    raise ConfigError(
        f"A batch holds {type(first).__name__}, which differs from rank to rank and of which prove "
        f"does not know how several become one. Pass prove(join=...), a function of the ranks' "
        f"batches that returns one device's."
    )


def _like(first: Mapping[Any, Any], joined: dict[Any, Any]) -> Any:
    made = copy.copy(first)
    made.update(joined)  # type: ignore[attr-defined]
    return made


def _joined_tensors(tensors: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(one.shape[1:]) for one in tensors}
    if tensors[0].ndim == 0:
        if all(torch.equal(one, tensors[0]) for one in tensors):
            return tensors[0].clone()
        raise ConfigError(
            "A batch holds a number that differs from rank to rank, and prove does not know what "
            "it is for all of them. Pass prove(join=...)."
        )
    if len(shapes) > 1:
        raise ConfigError(
            f"The ranks' batches have tensors of the shapes "
            f"{', '.join(str(tuple(one.shape)) for one in tensors)}, which one device's batch "
            f"cannot hold one after the other. Pad every batch to one length, or pass "
            f"prove(join=...), a function of the ranks' batches that returns one device's."
        )
    return torch.cat(list(tensors))


def halves(batch: Any) -> list[Any]:
    """Return the two halves of a batch; the batch alone where nothing in it can be cut."""
    sizes = {one.shape[0] for one in tensors_of(batch) if one.ndim > 0}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return [batch]
    cuts = [(0, size // 2), (size // 2, size // 2 * 2)]
    return [_picked(batch, list(range(first, stop))) for first, stop in cuts]


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    inside = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(inside, str | bytes) or not hasattr(inside, "__iter__"):
        return []
    return [tensor for one in inside for tensor in tensors_of(one)]


def samples_of(batch: Any) -> list[bytes]:
    """Return each sample as bytes, by which equal ones are found; none if they cannot be told."""
    tensors = [one for one in tensors_of(batch) if one.ndim > 0]
    if not tensors or len({one.shape[0] for one in tensors}) != 1:
        return []
    rows = range(tensors[0].shape[0])
    return [b"".join(one[row].contiguous().numpy().tobytes() for one in tensors) for row in rows]


def repeated(batches: Sequence[Sequence[Any]]) -> tuple[int, int, int] | None:
    """Return where a sample comes a second time: the first rank, the other rank, and its batch."""
    seen: dict[bytes, tuple[int, int]] = {}
    for number, of_ranks in enumerate(zip(*batches, strict=True)):
        for rank, batch in enumerate(of_ranks):
            for sample in samples_of(batch):
                first = seen.setdefault(sample, (rank, number))
                if first[0] != rank:
                    return first[0], rank, number
    return None


def num_repeats(batches: Sequence[Any]) -> int:
    """Return how many samples of one device's batches came before."""
    counts = Counter(sample for batch in batches for sample in samples_of(batch))
    return sum(count - 1 for count in counts.values())


def reordered(batch: Any, order: Callable[[int], list[int]]) -> Any:
    """Return a batch's samples in another order; the batch itself where they cannot be told."""
    sizes = {one.shape[0] for one in tensors_of(batch) if one.ndim > 0}
    return batch if len(sizes) != 1 else _picked(batch, order(sizes.pop()))


def _picked(value: Any, places: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value[places] if value.ndim else value
    if isinstance(value, Mapping):
        return _like(value, {key: _picked(one, places) for key, one in value.items()})
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str | bytes) for one in value):
            return type(value)(value[place] for place in places if place < len(value))
        parts = [_picked(one, places) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
