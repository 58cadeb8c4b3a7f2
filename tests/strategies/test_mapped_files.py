"""A file that a run loads is mapped: ranks check it together, and nothing that stays is mapped."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_shard.checkpoint.files.reading import Share, read_mapped
from lightning_shard.errors import CheckpointError
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from lightning_shard.testing import run_ranks
from tests.benchmarks.checkpoints import peak_above
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit, saving
from tests.examples.commands import ignoring_advice
from tests.groups import all_ranks

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")
NUM_TENSORS = 6
MOST_MEGABYTES = 32.0


def is_mapped(tensor: Tensor) -> bool:
    return not tensor.untyped_storage().resizable()


def tensors(nested: Any) -> list[Tensor]:
    return [one for one in tree_leaves(nested) if isinstance(one, Tensor)]


class Weights(nn.Module):
    """Parameters of several sizes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(100 * n) for n in range(1, NUM_TENSORS + 1))
        self.register_buffer("mean", torch.randn(50))


def saved(path: Path) -> Path:
    moments = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(100)}}}
    section = {
        "format": 2,
        "mesh": {},
        **{f"rank_{rank}": {"random": {"cpu": torch.randn(8)}} for rank in range(2)},
    }
    content = {
        "state_dict": Weights().state_dict(),
        "optimizer_states": [{**moments, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "callbacks": {"average": {"means": [torch.randn(5)]}},
        "lightning_shard": section,
    }
    torch.save(content, path)
    return path


def damage(path: Path, tensor: Tensor) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(tensor.detach().numpy().tobytes()) + 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("number", range(NUM_TENSORS))
def test_each_tensor_is_checked_by_one_of_the_ranks(number: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt")
    damage(path, torch.load(path)["state_dict"][f"weights.{number}"])

    def load(rank: int) -> str:
        group = all_ranks()
        try:
            CheckpointFiles().load_mapped(path, None, Weights(), group, rank)
        except CheckpointError as error:
            return str(error)
        return ""

    told = [one for one in run_ranks(load, 3) if one]
    assert len(told) == 1
    assert f"'state_dict.weights.{number}'" in told[0]


def test_what_is_no_tensor_is_checked_by_each_rank(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt")
    content = path.read_bytes()
    place = content.index(b"exp_avg") + 1
    path.write_bytes(content[:place] + b"Y" + content[place + 1 :])
    for number in range(3):
        with pytest.raises(CheckpointError, match=r"data.pkl"):
            read_mapped(path, share=Share(number, 3))


def test_ranks_that_see_other_files_check_all_of_theirs(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{rank}.ckpt") for rank in range(2)]
    for path in paths:
        damage(path, torch.load(path)["state_dict"]["weights.0"])

    def load(rank: int) -> bool:
        with pytest.raises(CheckpointError, match=r"weights\.0"):
            CheckpointFiles().load_mapped(paths[rank], None, Weights(), all_ranks(), rank)
        return True

    assert all(run_ranks(load, 2))


def test_only_what_is_copied_later_is_mapped(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt")
    loaded, plain = CheckpointFiles().load_mapped(path, None, Weights(), None, 1), torch.load(path)
    assert all(map(torch.equal, tensors(loaded), tensors(plain)))
    assert loaded.keys() == plain.keys()
    weights = loaded["state_dict"]
    assert all(is_mapped(value) == name.startswith("weights") for name, value in weights.items())
    assert all(map(is_mapped, tensors(loaded["optimizer_states"])))
    assert all(map(is_mapped, tensors(loaded["lightning_shard"]["rank_0"])))
    for copied in (loaded["callbacks"], loaded["lightning_shard"]["rank_1"]):
        assert tensors(copied)
        assert not any(map(is_mapped, tensors(copied)))


class Looks(L.Callback):
    """Notes what training goes on with that is mapped."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.mapped: list[str] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = {name: value for name, value in pl_module.state_dict().items() if value.numel()}
        for one in trainer.optimizers:
            state |= {str(place): value for place, value in enumerate(tensors(one.state_dict()))}
        self.num_seen = len(state)
        self.mapped = [name for name, value in state.items() if is_mapped(value.data)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["shard_ddp-2", "zero2-2", "zero3-3", "tensor-4", "pipeline-2"])
def test_a_run_keeps_nothing_that_is_mapped(layout: str, tmp_path: Path) -> None:
    path, looks = saving(LAYOUTS[layout](), tmp_path), Looks()
    fit(LAYOUTS[layout](), Model(), ckpt_path=path, callbacks=[looks])
    assert looks.num_seen > 10
    assert not looks.mapped


@pytest.mark.slow
def test_a_mapped_file_is_not_in_memory(tmp_path: Path) -> None:
    path, module = tmp_path / "last.ckpt", nn.Linear(1 << 12, 1 << 13)
    moments = {key: torch.randn_like(module.weight) for key in ("exp_avg", "exp_avg_sq")}
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [{"state": moments}]}, path)
    with peak_above() as peak:
        loaded = CheckpointFiles().load_mapped(path, None, module, None, 0)
    assert path.stat().st_size > 12 * MOST_MEGABYTES * 1e6
    assert peak[0] < MOST_MEGABYTES
    assert torch.equal(loaded["state_dict"]["weight"], module.weight)
