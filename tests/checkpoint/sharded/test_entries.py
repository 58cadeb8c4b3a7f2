"""Which entry of Lightning's checkpoint goes where in a folder, and back; what each rank keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard import DDPStrategy, LocalSGDStrategy
from lightning_shard.checkpoint.background_saves import write_folder
from lightning_shard.checkpoint.conversion.consolidating import consolidate
from lightning_shard.checkpoint.files.reading import read_file
from lightning_shard.checkpoint.sharded.entries import (
    OnDemand,
    checkpoint_of,
    folder_entries,
    stored_entries,
    take_out_entries,
)
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor
from lightning_shard.data_parallel.compression import TopK
from tests.checkpoint.interrupted import RANKS, SaveAt, deviation, fit, with_a_break
from tests.checkpoint.kept_runs import DILOCO
from tests.checkpoint.test_same_bits import IGNORED, KEPT, NUM_STEPS, WITHIN, Descending


def folder_of(path: Path, state: dict[str, Any], meta: Any = None) -> StoredFolder:
    write_folder(path, state, meta or {}, None)
    return StoredFolder(path)


def test_what_was_taken_apart_comes_back(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 3,
    }
    names = {param: name for name, param in module.named_parameters()}
    state, meta = folder_entries(saved, [optimizer], names, keeps=True)
    assert (set(state), meta) == ({"state_dict", "optimizer_0"}, {"epoch": 3})
    folder = folder_of(tmp_path / "folder", state, meta)
    found = checkpoint_of(folder, in_full=True)
    assert (found["epoch"], found["global_step"]) == (3, 0)
    torch.testing.assert_close(found["state_dict"], dict(module.state_dict()), rtol=0, atol=0)
    (found_state,) = found["optimizer_states"]
    assert isinstance(found_state["state"]["weight"]["exp_avg"], StoredTensor)
    assert found_state["param_groups"][0]["params"] == ["weight", "bias"]
    unread = checkpoint_of(folder, in_full=False)["state_dict"]
    assert all(isinstance(one, StoredTensor) for one in unread.values())


def test_ranks_that_keep_nothing_write_their_boxes_alone() -> None:
    state, meta = folder_entries({"state_dict": {"a": 1}, "epoch": 3}, [], {}, keeps=False)
    assert (state, meta) == ({"state_dict": {}}, {"epoch": 3})


pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED),
    pytest.mark.filterwarnings("ignore:The checkpoint was saved after .* samples of an epoch"),
]

TOP_K: dict[str, Any] = {"compression": TopK(ratio=0.05)}
DILOCO_TOP_K: dict[str, Any] = {
    "sync_every": 4,
    "outer_optimizer": DILOCO,
    "compression": TopK(ratio=0.1),
}
QUICK = ("topk", "diloco_topk")


def sharded(make: Callable[[], Any]) -> Any:
    strategy = make()
    strategy.checkpoint_format = "sharded"
    return strategy


def on(num_ranks: int, kind: str, options: dict[str, Any], strategy: Any = DDPStrategy) -> Any:
    return strategy(**(RANKS | {"num_ranks": num_ranks}), checkpoint_format=kind, **options)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in KEPT]
)
def test_what_a_rank_keeps_does_not_go_through_rank_0(name: str, tmp_path: Path) -> None:
    """What a rank keeps went through rank 0."""
    make, make_module = KEPT[name]
    path = tmp_path / "a.ckpt"
    broken, whole = with_a_break(
        lambda: sharded(make), path, at=WITHIN, num_steps=NUM_STEPS, make_module=make_module
    )
    assert broken.losses == whole.losses[WITHIN:]
    assert deviation(broken, whole) == 0.0
    section = read_file(path / "meta.pt", weights_only=True)["lightning_shard"]
    assert not {"rank_0", "rank_1"} & section.keys()
    assert not {"residual", "momentum"} & section.get("compression", {}).keys()
    assert not section.get("local_sgd", {}).get("own")


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of the same two ranks, in both formats."""
    folder = tmp_path_factory.mktemp("two")
    for kind in ("full", "sharded"):
        for name, options, strategy in (
            ("topk", TOP_K, DDPStrategy),
            ("diloco", DILOCO_TOP_K, LocalSGDStrategy),
        ):
            saving = [SaveAt(folder / f"{name}-{kind}", WITHIN)]
            fit(on(2, kind, options, strategy), WITHIN, saving, make_module=Descending)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "strategy"),
    [
        ("topk", TOP_K, DDPStrategy),
        pytest.param("diloco", DILOCO_TOP_K, LocalSGDStrategy, marks=pytest.mark.slow),
    ],
)
def test_other_ranks_go_on_from_the_same_means_in_both_formats(
    name: str, options: dict[str, Any], strategy: Any, of_two_ranks: Path
) -> None:
    full, other = (
        fit(
            on(3, "full", options, strategy),
            NUM_STEPS,
            resume=of_two_ranks / f"{name}-{kind}",
            make_module=Descending,
        )
        for kind in ("full", "sharded")
    )
    assert len(full.losses) == NUM_STEPS - WITHIN
    torch.testing.assert_close(other.losses, full.losses, rtol=1e-6, atol=0)
    assert deviation(other, full) < 1e-6


@pytest.mark.slow
def test_a_file_made_of_a_folder_has_what_ranks_keep(of_two_ranks: Path, tmp_path: Path) -> None:
    consolidate(of_two_ranks / "topk-sharded", tmp_path / "a.ckpt")
    for num_ranks in (2, 3):
        folder, file = (
            fit(on(num_ranks, "full", TOP_K), NUM_STEPS, resume=path, make_module=Descending)
            for path in (of_two_ranks / "topk-sharded", tmp_path / "a.ckpt")
        )
        assert folder.losses == file.losses
        assert deviation(folder, file) == 0.0


def test_a_rank_reads_its_own_residuals_alone(
    of_two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = StoredTensor.read

    def reading(stored: StoredTensor) -> torch.Tensor:
        read.append(stored.key)
        return real(stored)

    monkeypatch.setattr(StoredTensor, "read", reading)
    folder = of_two_ranks / "topk-sharded"
    fit(on(2, "full", TOP_K), WITHIN + 1, resume=folder, make_module=Descending)
    residuals = [key for key in read if ".compression.residual." in key]
    keys = [f"{rank}.compression.residual.{name}" for rank in ("rank_0", "rank_1")
            for name, _ in Descending().named_parameters()]  # fmt: skip
    assert sorted(residuals) == sorted(f"lightning_shard.{key}" for key in keys)


def test_each_rank_writes_its_own_entry(of_two_ranks: Path) -> None:
    index = StoredFolder(of_two_ranks / "topk-sharded")._index
    files = {
        (key.fqn.split(".")[1], place.relative_path)
        for key, place in index.storage_data.items()
        if key.fqn.startswith("lightning_shard.")
    }
    assert files == {("rank_0", "__0_0.distcp"), ("rank_1", "__1_0.distcp")}


def test_entries_of_other_forms_come_back(tmp_path: Path) -> None:
    from lightning_shard.checkpoint.background_saves import write_folder
    from lightning_shard.checkpoint.by_rank import in_memory
    from tests.checkpoint.test_by_rank import assert_same, entry_of

    entries = {f"rank_{rank}": {**entry_of(rank), "a": {"b.c": torch.ones(1)}, "a.b": {
        "c": torch.zeros(2)}} for rank in range(2)}  # fmt: skip
    section: dict[str, Any] = {"format": 3, **entries}
    state = {"lightning_shard": take_out_entries(section)}
    assert section == {"format": 3}
    write_folder(tmp_path / "one", state, {}, None)
    stored = stored_entries(StoredFolder(tmp_path / "one"))
    for name, entry in entries.items():
        assert_same(in_memory(OnDemand(stored[name])), entry)
