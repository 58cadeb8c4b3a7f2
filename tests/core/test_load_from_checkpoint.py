"""`load_from_checkpoint` on folders, under both roots of Lightning: what its arguments mean."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other_root
import torch
from torch import nn

from lightning_shard import CheckpointError, ZeRO3Strategy
from lightning_shard.on_pytorch_lightning import ZeRO3Strategy as OthersStrategy
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice()


class Setting:
    """An object among hyperparameters."""


def model_class(root: Any) -> Any:
    class Net(root.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 3, setting: Any = None, extra: bool = False) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(2, width)
            self.norm = nn.BatchNorm1d(width)
            if extra:
                self.more = nn.Linear(1, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.norm(self.layer(batch)).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = [len(one["state"]) for one in checkpoint["optimizer_states"]]

    return Net


def data_class(root: Any) -> Any:
    class Data(root.LightningDataModule):  # type: ignore[misc]
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(8, 2), self.hparams.size)

        def state_dict(self) -> dict[str, Any]:
            return {"position": 7}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    return Data


def saved(root: Any, strategy: Any, path: Path, **hyperparameters: Any) -> Any:
    model = model_class(root)(width=5, **hyperparameters)
    trainer = root.Trainer(
        accelerator="cpu",
        strategy=strategy(
            backend="in_process", num_ranks=2, checkpoint_format="sharded", announce=False
        ),
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[root.callbacks.ModelCheckpoint(path.parent, path.stem, every_n_train_steps=1)],
    )
    trainer.fit(model, data_class(root)(size=2))
    return model


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    root, strategy = {
        "lightning.pytorch": (pl, ZeRO3Strategy),
        "pytorch_lightning": (other_root, OthersStrategy),
    }[request.param]
    path = tmp_path_factory.mktemp("folders") / "one.ckpt"
    return root, path, saved(root, strategy, path)


def test_a_model_loads_from_a_folder(checkpoint: tuple[Any, Path, Any]) -> None:
    root, path, trained = checkpoint
    assert path.is_dir()
    model = model_class(root).load_from_checkpoint(path)
    assert model.hparams.width == 5
    assert model.seen == [4]
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_strict_and_hyperparameters_and_places_keep_their_meaning(
    checkpoint: tuple[Any, Path, Any],
) -> None:
    root, path, trained = checkpoint
    with pytest.raises(RuntimeError, match=r"Missing key.*more\.weight"):
        model_class(root).load_from_checkpoint(str(path), extra=True)
    with pytest.warns(UserWarning, match=r"not in the checkpoint: \['more.weight'"):
        model = model_class(root).load_from_checkpoint(str(path), extra=True, strict=False)
    assert torch.equal(model.layer.weight, trained.layer.weight)
    assert "more.weight" in model.state_dict()
    for place in ("meta", torch.device("meta"), {"cpu": "meta"}):
        loaded = pl.core.saving.pl_load(path, place)
        assert loaded["state_dict"]["layer.weight"].is_meta
    for place in (lambda storage, location: storage, lambda storage, location: None):
        loaded = pl.core.saving.pl_load(path, place)
        assert torch.equal(loaded["state_dict"]["layer.weight"], trained.layer.weight)


def test_a_data_module_loads_from_a_folder(checkpoint: tuple[Any, Path, Any]) -> None:
    root, path, _ = checkpoint
    data = data_class(root).load_from_checkpoint(path)
    assert data.hparams.size == 2
    assert data.position == 7


def test_objects_are_loaded_when_asked_for_alone(tmp_path: Path) -> None:
    path = tmp_path / "objects.ckpt"
    saved(pl, ZeRO3Strategy, path, setting=Setting())
    with pytest.raises(CheckpointError, match="Setting"):
        model_class(pl).load_from_checkpoint(path)
    model = model_class(pl).load_from_checkpoint(path, weights_only=False)
    assert isinstance(model.hparams.setting, Setting)


def test_a_folder_that_is_no_checkpoint_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder without \.metadata"):
        model_class(pl).load_from_checkpoint(tmp_path)
