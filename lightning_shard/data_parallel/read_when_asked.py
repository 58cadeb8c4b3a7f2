"""Tensors by name that are made when somebody asks for one, and then forgotten.

So a rank takes up what a checkpoint holds tensor by tensor, with no copy of all of it beside.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override


class ReadWhenAsked(Mapping[str, Tensor]):
    """Tensors by name, each made anew whenever it is asked for.

    Args:
        names: Names of all of them.
        read: Makes the tensor of a name.
    """

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._names

    @override
    def __iter__(self) -> Iterator[str]:
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

    Returns:
        Means by name, in the format that they have on the first rank.
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
