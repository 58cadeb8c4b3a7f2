"""Deviations, and what of the ranks is compared with what of one device."""

import math

import torch
from torch import Tensor

from lightning_shard.tools.proving.comparison import compare, deviation
from lightning_shard.tools.proving.records import Kind, Phase, Place, Record, Records


def place(name: str, kind: Kind, phase: Phase, step: int = 0) -> Place:
    return Place(step, 0, phase, kind, name)


def alone(**outputs: Tensor) -> Records:
    values = {place(name, "output", "forward"): [one] for name, one in outputs.items()}
    return Records(
        records=[Record(values={**values, place("loss", "loss", "loss"): [torch.ones(())]})]
    )


def on_ranks(of_ranks: list[dict[str, list[Tensor]]], loss: float = 2.0) -> Records:
    records = []
    for rank, outputs in enumerate(of_ranks):
        values = {place(name, "output", "forward"): one for name, one in outputs.items()}
        values[place("loss", "loss", "loss")] = [torch.tensor(loss)]
        records.append(
            Record(rank=rank, data_rank=rank, num_data_ranks=len(of_ranks), values=values)
        )
    return Records(records=records)


def test_deviation() -> None:
    values = torch.tensor([1.0, 4.0])
    assert deviation(values, values) == 0.0
    assert math.isclose(deviation(torch.tensor([1.0, 4.4]), values), 0.1, rel_tol=1e-6)
    assert deviation(torch.ones(3), values) == math.inf
    assert deviation(torch.tensor([math.nan]), torch.tensor([math.nan])) == 0.0
    assert deviation(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0.0
    assert deviation(torch.tensor([math.nan]), torch.ones(1)) == math.inf


def test_next_to_nothing_is_measured_by_its_kind() -> None:
    noise = deviation(torch.tensor([2e-17]), torch.tensor([1e-17]), scale=1.0)
    assert noise < 1e-9


def test_the_output_that_leads_to_a_difference_is_the_first() -> None:
    rows = torch.arange(8.0).view(4, 2)
    ranks = on_ranks([{"block": [rows[:2]]}, {"block": [rows[2:] + 1]}])
    first = compare(ranks, alone(block=rows), 1e-6).first
    assert first is not None
    assert (first.place.name, first.rank) == ("block", 1)
    assert first.worst[:2] == (5.0, 4.0)


def test_outputs_alone_are_no_difference() -> None:
    rows = torch.arange(8.0).view(4, 2)
    ranks = on_ranks([{"block": [rows[:2]]}, {"block": [rows[2:] + 1]}], loss=1.0)
    assert compare(ranks, alone(block=rows), 1e-6).first is None


def test_microbatches_are_put_together_and_other_dimensions_found() -> None:
    columns = torch.arange(8.0).view(2, 4)
    parts = [{"block": [columns[:, :2]]}, {"block": [columns[:, 2:]]}]
    assert not outputs_that_differ(parts, columns)
    rows = torch.arange(8.0).view(4, 2)
    parts = [{"block": [rows[:1], rows[1:2]]}, {"block": [rows[2:3], rows[3:]]}]
    assert not outputs_that_differ(parts, rows)


def outputs_that_differ(parts: list[dict[str, list[Tensor]]], expected: Tensor) -> list[str]:
    found = compare(on_ranks(parts), alone(block=expected), 1e-6)
    return [one.place.name for one in found.differences if one.place.kind == "output"]
