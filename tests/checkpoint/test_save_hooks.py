"""What hooks that save and load see of a checkpoint, on every rank, and under elastic training."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_shard
from lightning_shard.testing import Fault, injected_faults
from tests.trainers import cpu_trainer

pytestmark = [pytest.mark.filterwarnings("ignore")]

WIDE, FULL = 6, (6, 32)


class ReadsCheckpoints(BoringModel):
    """Does what pytorch-forecasting's models do: reads and changes Lightning's usual keys."""

    seen: "defaultdict[int, list[dict[str, Any]]]"  # by rank
    loaded: list[dict[str, Any]]

    def __init__(self, width: int = WIDE) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, width)
        self.layer = nn.Sequential(*layers)
        self.register_buffer("count", torch.ones(3))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"].update(extra=1)
        for state in checkpoint["state_dict"].values():
            state.mul(2)
        self.seen[getattr(self.trainer.strategy, "mesh_rank", 0)].append(dict(checkpoint))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(dict(checkpoint))


def fit(strategy: Any, folder: Path, **options: Any) -> type[ReadsCheckpoints]:
    class Model(ReadsCheckpoints):
        seen = defaultdict(list)  # noqa: RUF012
        loaded: list[dict[str, Any]] = []  # noqa: RUF012

    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Model())
    return Model


@pytest.mark.parametrize(
    "strategy",
    ["shard_ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline_parallel", "local_sgd"],
)
def test_hooks_that_save_find_weights_on_every_rank(strategy: str, tmp_path: Path) -> None:
    """Hooks that save found no weights on ranks other than 0."""
    seen = fit(f"{strategy}_in_process", tmp_path, devices=2).seen
    first, second = (seen[rank][-1] for rank in range(2))
    assert list(second) == list(first)
    assert list(second["state_dict"]) == list(first["state_dict"])
    for name, value in first["state_dict"].items():
        assert second["state_dict"][name].shape == value.shape, name
        assert second["state_dict"][name].dtype == value.dtype, name
    weights = [one["state_dict"]["layer.0.weight"] for one in (first, second)]
    if strategy in {"shard_ddp", "zero1", "zero2", "local_sgd"}:
        assert torch.equal(*weights)
    else:  # what would read an element is an error
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            weights[1].sum().item()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero3"])
def test_hooks_that_save_find_lightnings_keys_in_elastic_snapshots(
    scheme: Any, tmp_path: Path
) -> None:
    """Hooks that save missed Lightning's keys in elastic snapshots."""
    alone = fit("auto", tmp_path, devices=1).seen[0][-1]
    strategy = lightning_shard.ElasticStrategy(
        backend="in_process", num_ranks=2, scheme=scheme, snapshot_every=1
    )
    with injected_faults([Fault(rank=1, at_collective=1, at_step=2, kind="drop")]):
        model = fit(strategy, tmp_path)
    snapshots = model.seen[0][:-1]  # the last is a file
    assert snapshots
    for snapshot in [*snapshots, *model.loaded]:
        assert set(alone) <= set(snapshot)
        assert list(snapshot["state_dict"]) == list(alone["state_dict"])
        assert snapshot["state_dict"]["layer.3.weight"].shape == FULL
        assert snapshot["hyper_parameters"]["width"] == WIDE
    after_a_step = snapshots[-1]["optimizer_states"][0]["state"]
    assert {tuple(state["exp_avg"].shape) for state in after_a_step.values()} >= {FULL}
    assert model.loaded


class HasAMistake(BoringModel):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise LookupError("mine")


def test_an_error_of_a_hook_that_saves_is_the_users_own(tmp_path: Path) -> None:
    trainer = cpu_trainer(
        strategy="elastic_in_process", devices=2, max_steps=3, default_root_dir=tmp_path
    )
    with pytest.raises(LookupError, match="mine"):
        trainer.fit(HasAMistake())
