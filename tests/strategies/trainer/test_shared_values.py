"""Values of one rank come to the others whole, whatever they hold."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import Placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer.shared_values import SharedValues
from lightning_shard.testing import run_ranks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Output:
    loss: Tensor
    name: str


def _shared(make_values: list[Any], num_ranks: int = 3) -> list[list[Any]]:
    """Share values of the last rank one after the other; what each rank has got."""

    def on_rank(rank: int) -> list[Any]:
        shared = SharedValues(Collectives(dist.group.WORLD), num_ranks - 1)
        is_source = rank == num_ranks - 1
        return [shared.share(value if is_source else None, CPU) for value in make_values]

    return [found or [] for found in run_ranks(on_rank, num_ranks)]


VALUES: list[Any] = [
    None,
    torch.tensor(0.1),
    {"loss": torch.tensor(0.5, dtype=torch.bfloat16), "n": 3, "share": 0.1, "text": "a"},
    Output(torch.zeros(2, 3), "first"),
    (torch.ones(65), [torch.arange(3), torch.tensor([True, False])], torch.zeros(0, 4)),
    [2**60, -(2**60), True, 1 + 2j, torch.Size([2, 3]), torch.float16, {1, 2}],
    torch.zeros(3, 4).t(),
    {"sparse": torch.eye(3).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64)},
    [],
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, which unpickles them
def test_every_rank_gets_equal_values_again_and_again() -> None:
    for received in _shared(VALUES * 2):
        for value, expected in zip(received, VALUES * 2, strict=True):
            assert type(value) is type(expected)
            assert _plain(value) == _plain(expected)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.to_dense().tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return (_plain(value.loss), value.name) if isinstance(value, Output) else value


def test_the_source_keeps_its_value_and_graph_and_others_get_copies() -> None:
    value = {"loss": torch.tensor(1.0, requires_grad=True) * 2, "x": torch.ones(100)}
    first, second = _shared([value], 2)
    assert second[0] is value
    assert first[0]["loss"] == 2.0
    assert not first[0]["loss"].requires_grad
    first[0]["x"].zero_()
    assert value["x"].sum() == 100


def test_forms_without_end_are_forgotten_and_still_arrive() -> None:
    values = [{f"name {index}": float(index)} for index in range(150)]
    first, _ = _shared(values + values[-3:], 2)
    assert first == values + values[-3:]


def test_a_value_of_another_stage_is_refused() -> None:
    elsewhere = Placeholder.of(torch.zeros(()), (4, 2), "embedding.weight")
    with pytest.raises(ConfigError, match=r"\(4, 2\) that is computed from 'embedding.weight'"):
        _shared([{"out": elsewhere}], 2)
