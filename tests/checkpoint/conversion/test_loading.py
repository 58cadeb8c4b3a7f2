"""Safetensors into modules: plain ones, on "meta", and of runs whose ranks have shards."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_shard import CheckpointError, load_safetensors
from lightning_shard.checkpoint.conversion.consolidating import Consolidation, consolidate
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit
from tests.examples.commands import ignore_upstream_warnings

pytestmark = ignore_upstream_warnings


class Loading(Model):
    """Loads in one of its hooks, and does not learn."""

    def __init__(self, path: Path, hook: str) -> None:
        super().__init__()
        self.path = path
        setattr(self, hook, self.load)

    def load(self) -> None:
        """Load the whole file."""
        load_safetensors(self, self.path)

    def configure_optimizers(self) -> Any:
        """Return an optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder with an index, in bfloat16."""
    torch.manual_seed(7)
    state = {name: torch.randn_like(one).bfloat16() for name, one in Model().state_dict().items()}
    folder = tmp_path_factory.mktemp("weights")
    torch.save(state, folder / "in.pt")
    consolidate(folder / "in.pt", folder / "hf", Consolidation(max_shard_bytes=300))
    assert len(list((folder / "hf").iterdir())) > 2
    return folder / "hf", state


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("layout", "hook"),
    [
        ("zero3-4", "configure_model"),
        ("zero3-4", "on_fit_start"),
        ("zero2-2", "on_train_start"),
        ("tensor-4", "configure_model"),
        ("pipeline-2", "on_fit_start"),
        ("hybrid-8", "on_train_start"),
    ],
)
def test_a_run_loads_in_its_hooks(
    layout: str, hook: str, weights: tuple[Path, dict[str, Tensor]]
) -> None:
    path, state = weights
    trained = fit(LAYOUTS[layout](), Loading(path, hook), max_steps=1)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, state[name].float()), name


class Tied(nn.Module):
    """Two names of one weight, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def test_a_module_on_meta_is_made_as_it_is_loaded(tmp_path: Path) -> None:
    whole = Tied()
    state = {name: one for name, one in whole.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "one.safetensors")
    with torch.device("meta"):
        module = Tied()
    module.norm.weight.requires_grad_(False)
    misses = load_safetensors(module, tmp_path / "one.safetensors")
    assert misses.missing_keys == ["head.weight"]
    assert module.head.weight is module.embed.weight
    assert not module.norm.weight.requires_grad
    for name, tensor in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_what_does_not_fit_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    path, module = tmp_path / "one.safetensors", nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file({"weight": torch.ones(3, 2), "more": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"'bias'; Unexpected key\(s\): 'more'.*strict=False"):
        load_safetensors(module, path)
    safetensors.torch.save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(3, 3\), expected \(3, 2\)"):
        load_safetensors(module, path, strict=False)
    for name, tensor in before.items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_without_strict_the_names_that_are_there_are_loaded(tmp_path: Path) -> None:
    path, module = tmp_path / "one.safetensors", nn.Linear(2, 3)
    safetensors.torch.save_file({"weight": torch.ones(3, 2), "more": torch.ones(1)}, path)
    assert load_safetensors(module, path, strict=False) == (["bias"], ["more"])
    assert torch.equal(module.weight, torch.ones(3, 2))
