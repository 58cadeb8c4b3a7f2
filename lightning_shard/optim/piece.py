"""A run of shards that one param group updates, as one long parameter with one state.

    shards of a buffer     [ w1 | b1 | w2 | b2 ]
    entries of the piece   exp_avg [ m1 | .. | m2 | .. ]     step: one number
    state[w1]              exp_avg: the view of m1           step: a view of one of four numbers

The optimizer has the entries while it steps on the piece. Everybody else finds the views, and may
edit them; counts are looked at again where somebody has.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.flat_gradients import FlatGradients
from lightning_shard.data_parallel.tensor_properties import VERSION
from lightning_shard.layout.flat import ShardSlice

_States = dict[Any, Any]  # by parameter its entries, as `optimizer.state`
_UNREAD, _DIFFERENT = -1, -2  # in place of the version at which counts were found to be equal


class Piece:
    """Shards of one buffer that lie together, and what an optimizer keeps for them.

    Args:
        gradients: The buffer's gradients.
        group: Number of the param group.
        slices: By the parameter's index in the buffer, where its elements lie in the shard; none
            without elements.

    Attributes:
        param: The shards as one parameter, shape (E,), with the padding between them.
        params: The parameters whose shards these are.
    """

    def __init__(
        self, gradients: FlatGradients, group: int, slices: Mapping[int, ShardSlice]
    ) -> None:
        self.gradients, self.group = gradients, group
        self.params = [gradients.flat.params[index] for index in slices]
        start = min(one.shard_offset for one in slices.values())
        self._bounds = slice(start, max(one.shard_stop for one in slices.values()))
        self._parts = [
            slice(one.shard_offset - start, one.shard_stop - start) for one in slices.values()
        ]
        self.param = nn.Parameter(gradients.flat.master[self._bounds], requires_grad=False)
        self._entries: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}  # of the parameters
        self._counts: dict[str, Tensor] = {}  # entries that are numbers, one for each parameter
        self._versions: dict[str, int] = {}  # of those, when they were equal
        self._fits = True

    def adopt(self, states: _States) -> bool:
        """Let the parameters' entries be views of the piece's, where they are not yet.

        Args:
            states: The optimizer's state.

        Returns:
            Whether they are now; not where some parameters have entries that others have not, or
            of another kind.
        """
        own = [states.get(param) or {} for param in self.params]
        if any(one.keys() != own[0].keys() for one in own):
            return False
        for key in self._entries.keys() - own[0].keys():
            self._forget(key)
        return all(self._join(key, own) for key in own[0])

    def _join(self, key: str, own: Sequence[dict[str, Any]]) -> bool:
        values = [one[key] for one in own]
        if all(map(is_, values, self._views.get(key, [None]))):
            return True
        if not all(map(_are_alike, values, [values[0]] * len(values))):
            return False
        self._forget(key)
        if values[0].ndim == 0:
            self._hold(key, values[0].clone(), torch.stack(values), own)
        elif all(map(_fits, values, self._parts)):
            joined = values[0].new_zeros(self.param.shape)
            torch._foreach_copy_([joined[part] for part in self._parts], values)
            self._hold(key, joined, joined, own)
        else:
            return False
        return True

    def _hold(self, key: str, entry: Tensor, memory: Tensor, own: Sequence[dict[str, Any]]) -> None:
        """Keep an entry, and show each parameter its part of a memory."""
        parts: Sequence[Any] = self._parts if entry.ndim else range(len(self.params))
        self._entries[key], self._views[key] = entry, [memory[part] for part in parts]
        if not entry.ndim:
            self._counts[key], self._versions[key] = memory, _UNREAD
        for entries, view in zip(own, self._views[key], strict=True):
            entries[key] = view

    def _forget(self, key: str) -> None:
        kept: Sequence[dict[str, Any]]
        kept = (self._entries, self._views, self._counts, self._versions)
        for one in kept:
            one.pop(key, None)

    def agrees(self) -> bool:
        """Whether the parameters' counts are equal, so that one can stand for all.

        On a GPU they are read once: a step is not to wait for it.
        """
        return self._fits and all(map(self._is_one, self._counts))

    def _is_one(self, key: str) -> bool:
        counts, version = self._counts[key], self._versions[key]
        if VERSION(counts) == version:
            return True
        if counts.device.type != "cpu" and version != _UNREAD:
            return False
        first, *others = counts.tolist()
        is_one = others.count(first) == len(others)
        self._versions[key] = VERSION(counts) if is_one else _DIFFERENT
        self._entries[key].fill_(first)
        return is_one

    def lend(self, states: _States) -> None:
        """Let the optimizer step on the piece, whose gradient and entries it finds."""
        local = self.gradients.buffer.local
        assert local is not None
        self.param.grad = local[self._bounds]
        if self._entries:
            states[self.param] = {**self._entries}

    def take_back(self, states: _States) -> None:
        """Show the parameters what the optimizer has made of the entries."""
        self.param.grad = None
        for key, value in states.pop(self.param, {}).items():
            if key in self._entries:
                self._update(key, value)
            elif isinstance(value, Tensor) and value.shape in ((), self.param.shape):
                own = [states[param] for param in self.params]
                memory = value if value.ndim else value.repeat(len(own))
                self._hold(key, value, memory, own)
                self._note_counts(key)
            else:  # nothing of torch's is: the next step is made for each parameter
                self._fits = False
                for param in self.params:
                    states[param][key] = value

    def _update(self, key: str, value: Tensor) -> None:
        entry = self._entries[key]
        if value is not entry:
            entry.copy_(value)
        if key in self._counts:
            self._counts[key].copy_(entry)
            self._note_counts(key)

    def _note_counts(self, key: str) -> None:
        if key in self._counts:
            self._versions[key] = VERSION(self._counts[key])


def _are_alike(value: Any, other: Any) -> bool:
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return False
    return (value.dtype, value.device, value.ndim) == (other.dtype, other.device, other.ndim)


def _fits(value: Tensor, part: slice) -> bool:
    return value.shape == (part.stop - part.start,)
