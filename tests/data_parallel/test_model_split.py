"""Owners of parameters that are updated full, by stage and by ranks that have parts of layers."""

from collections.abc import Collection
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.model_split import Owners, Unsplit, share_out
from lightning_shard.planning.simulated_model import SimulatedCollectives


class Halves(Unsplit):
    """Two ranks have half of each matrix; this is the second, and has no part of "away"."""

    parts: Any = None

    def __init__(self, away: Collection[nn.Parameter] = frozenset()) -> None:
        class Parts:
            group: Any = SimulatedCollectives(1, 2)
            shardings: ClassVar[Any] = {}

        self.parts, self._away = Parts(), away

    def is_here(self, param: nn.Parameter) -> bool:
        return param not in self._away

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        return torch.Size([2 * param.shape[0], *param.shape[1:]])


def shared_out(
    stage: int, num_shards: int, split: Unsplit, sizes: tuple[int, ...] = (4, 9, 5, 3, 8)
) -> tuple[list[int | None], list[int | None], Owners]:
    """Return the rank among shards and among parts of each parameter; the last one is frozen."""
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    params[-1].requires_grad_(False)
    group: Any = SimulatedCollectives(0, num_shards)
    owners = share_out(
        nn.ParameterList(params), DataGroups.of(group), split, stage=stage, owned={*params}
    )
    found = [[of.get(one) for one in params] for of in (owners.of_shards, owners.of_parts)]
    return found[0], found[1], owners


NONE = [None] * 5


@pytest.mark.parametrize(
    ("stage", "num_shards", "split", "of_shards", "of_parts"),
    [
        (0, 2, Unsplit(), NONE, NONE),  # each rank has everything
        (1, 2, Unsplit(), [1, 0, 1, 0, 0], NONE),
        (0, 2, Halves(), NONE, [1, 0, 1, 0, 0]),
        (2, 2, Halves(), [0, 0, 1, 1, 0], [1, 0, 0, 1, 0]),
    ],
)
def test_each_rank_has_a_like_share(
    stage: int, num_shards: int, split: Unsplit, of_shards: list[Any], of_parts: list[Any]
) -> None:
    assert shared_out(stage, num_shards, split)[:2] == (of_shards, of_parts)


def test_one_of_the_ranks_with_parts_gathers() -> None:
    param, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    owners = Owners(rank=1, of_parts={param: 1})
    assert owners.gathers(param)
    assert not owners.gathered_elsewhere(param)
    assert not owners.gathers(other)
    assert not owners.gathered_elsewhere(other)  # each rank updates its part
    elsewhere = Owners(rank=0, of_parts={param: 1})
    assert not elsewhere.gathers(param)
    assert elsewhere.gathered_elsewhere(param)


def test_parameters_of_other_stages_have_no_owner_here() -> None:
    param, away = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    group: Any = SimulatedCollectives(0, 1)
    model = nn.ParameterList([param, away])
    groups, split = DataGroups.of(group), Halves({away})
    owners = share_out(model, groups, split, stage=0, owned={param, away})
    assert dict(owners.of_parts) == {param: 0}
