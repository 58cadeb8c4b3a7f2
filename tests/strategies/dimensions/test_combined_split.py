"""Splits of several dimensions are one split."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.model_split import Unsplit, combined


class Halves(Unsplit):
    """This rank has the first half along a dimension; the others' are zeros."""

    def __init__(self, group: str, dim: int, *, counts: bool = True) -> None:
        own: Any = group
        self.groups = (own,)
        self.group_sets = ((), (own,))
        self._dim, self._counts = dim, counts

    def groups_of(self, param: nn.Parameter) -> Any:
        return self.groups

    def counts(self, param: nn.Parameter) -> bool:
        return self._counts

    def is_spread(self, param: nn.Parameter) -> bool:
        return self._dim == 2

    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        return torch.cat([local, torch.zeros_like(local)], self._dim)

    def local(self, param: nn.Parameter, full: Tensor) -> Tensor:
        return full.narrow(self._dim, 0, full.shape[self._dim] // 2)


def test_nothing_and_one_split_stay_what_they_are() -> None:
    alone = Halves("a", 0)
    assert combined([]) is None
    assert combined([alone]) is alone


def test_three_splits_are_undone_in_the_other_order() -> None:
    split = combined([Halves("a", 0), Halves("b", 1, counts=False), Halves("c", 2)])
    assert split is not None
    param = nn.Parameter(torch.arange(64.0).view(4, 4, 4))
    own = split.local(param, param.detach())
    assert torch.equal(own, param[:2, :2, :2])
    full = split.full(param, own)
    assert torch.equal(full[:2, :2, :2], own)
    assert full.sum() == own.sum()
    assert list(split.groups) == list(split.groups_of(param)) == ["a", "b", "c"]
    sets = ["".join(map(str, one)) for one in split.group_sets]
    assert sorted(sets) == ["", "a", "ab", "abc", "ac", "b", "bc", "c"]
    assert split.is_spread(param)
    assert split.is_here(param)
    assert not split.counts(param)
