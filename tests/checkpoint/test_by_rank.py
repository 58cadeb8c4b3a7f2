"""What each rank keeps for itself: brought together, in a file, and taken up by the same rank."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.by_rank import entries_of_ranks, gather_entries, own_entry
from lightning_shard.checkpoint.files.torch_archive import write_archive
from lightning_shard.checkpoint.random_state import load_random_state, random_misfit, random_state
from lightning_shard.checkpoint.streamed import StreamedFile
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import world

CPU = torch.device("cpu")
MESH = ParallelMesh(dp=3)


def entry_of(rank: int) -> dict[str, Any]:
    """Return what has another form on each rank."""
    entry: dict[str, Any] = {
        "number": rank,
        "step": torch.tensor(float(rank)),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T + rank,
        "flags": torch.tensor([True, False]),
        "waves": torch.full((2,), complex(rank, 1.0)),
        "within": {"list": [torch.full((rank + 1,), rank, dtype=torch.bfloat16), None, "text"]},
    }
    if rank == 1:
        entry["more"] = {"of one": torch.arange(4, dtype=torch.int16)}
    return entry


def gathered(rank: int) -> dict[str, Any]:
    collectives: Collectives = world("in_process")
    return gather_entries(entry_of(rank), MESH, collectives, CPU)


def assert_same(got: Any, expected: Any) -> None:
    """Compare nested containers."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def test_entries_of_other_forms_come_together_on_the_first_rank(tmp_path: Path) -> None:
    first, *others = run_ranks(gathered, 3)
    assert others == [{}, {}]
    torch.save(first, tmp_path / "section.pt")
    section = torch.load(tmp_path / "section.pt", weights_only=True)
    assert [name for name, _ in entries_of_ranks(section)] == ["rank_0", "rank_1", "rank_2"]
    for rank in range(3):
        assert_same(own_entry(section, MESH, rank), entry_of(rank))


def test_entries_never_come_together_on_the_first_rank(tmp_path: Path) -> None:
    """Entries came together on the first rank before a file was written."""

    def save(rank: int) -> None:
        file, group = StreamedFile(), world("in_process")
        section = gather_entries(entry_of(rank), MESH, group, CPU, file)
        assert bool(section) == (rank == 0)
        tensors = [one for one in tree_leaves(section) if isinstance(one, torch.Tensor)]
        assert all(one.is_meta for one in tensors)
        if rank == 0:
            with (tmp_path / "section.pt").open("wb") as written:
                write_archive(written, file.records(section))
        file.finish()

    run_ranks(save, 3)
    section = torch.load(tmp_path / "section.pt", weights_only=True)
    for rank in range(3):
        assert_same(own_entry(section, MESH, rank), entry_of(rank))


def test_another_mesh_of_as_many_ranks_takes_up_no_entries_of_other_ranks() -> None:
    """Another mesh of as many ranks took up entries of other ranks."""
    section = run_ranks(gathered, 3)[0]
    assert own_entry(section, ParallelMesh(dp=3), 2)
    for mesh in (
        ParallelMesh(tp=3),
        ParallelMesh(dp=2),
        ParallelMesh(dp=3, axis_order=("tp", "dp", "pp")),
    ):
        assert own_entry(section, mesh, 1) == {}
    assert own_entry({}, MESH, 0) == {}


def drawn() -> list[float]:
    return [
        float(torch.rand(())),
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_random_streams_go_on(tmp_path: Path) -> None:
    drawn()  # the second normal number of a pair is kept
    torch.save(random_state(CPU), tmp_path / "random.pt")
    expected = drawn()
    state = torch.load(tmp_path / "random.pt", weights_only=True)
    assert random_misfit(state) is None
    load_random_state(state, CPU)
    assert drawn() == expected


def test_random_streams_that_cannot_be_set_are_found_before() -> None:
    state = random_state(CPU)
    assert "KeyError: 'python'" in (random_misfit({"torch": state["torch"]}) or "")
    assert "(7, torch.uint8)" in (random_misfit({**state, "torch": state["torch"][:7]}) or "")
