"""The Trainer's entry points: fit, validate, test, predict, and the Tuner."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.features.columns import COLUMNS, Here
from tests.features.declared import add, by, feature
from tests.features.network import (
    Loaders,
    Network,
    Report,
    WithRate,
    assigned,
    dataset,
    fitted,
    left_by,
    loader,
    weights,
)

GROUP = "Entry points"


def _entry(name: str, here: Here) -> Report:
    trainer = here.trainer()
    return {"logged": getattr(trainer, name)(Network(), datamodule=Loaders(here), verbose=False)}


add(GROUP, "validate", partial(_entry, "validate"))
add(GROUP, "test", partial(_entry, "test"))


@feature(GROUP, "predict")
def predict(here: Here) -> Report:
    outputs = here.trainer().predict(Network(), datamodule=Loaders(here))
    return {"all": torch.cat(outputs)}


@feature(GROUP, "fit, validate, test and predict with one Trainer")
def all_entries(here: Here) -> Report:
    trainer, module, data = here.trainer(), Network(), Loaders(here)
    trainer.fit(module, datamodule=data)
    validated = trainer.validate(module, datamodule=data, verbose=False)
    tested = trainer.test(module, datamodule=data, verbose=False)
    all_ = torch.cat(trainer.predict(module, datamodule=data))
    return {"validated": validated, "tested": tested, "all": all_, "weights": weights(module)}


@feature(GROUP, "two fits of one module")
def two_fits(here: Here) -> Report:
    module = Network()
    fitted(here, module, max_epochs=1)
    return fitted(here, module, max_epochs=1)


@feature(GROUP, "two fits of one Trainer")
def same_trainer(here: Here) -> Report:
    trainer, module = here.trainer(max_epochs=1), Network()
    trainer.fit(module, datamodule=Loaders(here))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=Loaders(here))
    return left_by(trainer, module)


class _OwnLoaders(Network):
    """Has its loaders itself."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self._here = here

    def train_dataloader(self) -> Any:
        return assigned(self._here, self.trainer, 4)

    def val_dataloader(self) -> Any:
        return loader(self._here, 2, seed=2)


@feature(GROUP, "loaders of the module")
def loaders_of_the_module(here: Here) -> Report:
    trainer, module = here.trainer(), _OwnLoaders(here)
    trainer.fit(module)
    return left_by(trainer, module)


@feature(GROUP, "loaders given to fit")
def loaders_given(here: Here) -> Report:
    trainer, module = here.trainer(limit_train_batches=2, max_epochs=1), Network()
    trainer.fit(module, loader(here, 4), loader(here, 2, seed=2))
    return {"step": trainer.global_step}


class _Prepared(Loaders):
    """Prepares data once, sets up and tears down on each rank, and has a state."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"load {state['calls']}")


@feature(GROUP, "LightningDataModule")
def data_module(here: Here) -> Report:
    data = _Prepared(here)
    first = here.trainer(max_epochs=1)
    first.fit(Network(), datamodule=data)
    first.save_checkpoint(here.folder / "data.ckpt")
    again, module = here.trainer(), Network()
    again.fit(module, datamodule=data, ckpt_path=here.folder / "data.ckpt")
    return left_by(again, module) | {"calls": data.calls}


@feature(GROUP, "Tuner.lr_find", refused=by("elastic", "learning-rate finder"))
def lr_find(here: Here) -> Report:
    module = WithRate()
    found = Tuner(here.trainer(max_epochs=1)).lr_find(
        module,
        datamodule=Loaders(here),
        min_lr=1e-3,
        max_lr=0.1,
        num_training=6,
        early_stop_threshold=None,
    )
    return {"rates": found.results["lr"], "chosen": module.lr}


class _Sized(Loaders):
    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.batch_size = 1

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(32), batch_size=self.batch_size)


def _scale(mode: str, here: Here) -> Report:
    data = _Sized(here)
    size = Tuner(here.trainer(max_epochs=1)).scale_batch_size(
        Network(), datamodule=data, mode=mode, steps_per_trial=1, max_trials=2, init_val=1
    )
    return {"size": size, "set": data.batch_size}


for _mode in ("power", "binsearch"):
    add(
        GROUP,
        f'Tuner.scale_batch_size(mode="{_mode}")',
        partial(_scale, _mode),
        refused=by(tuple(COLUMNS), "Tuning the batch size is currently not supported"),
    )


class _Results(Callback):
    """Asks the Trainer what it offers to hooks."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.answers = {
            "batches": trainer.num_training_batches,
            "steps": trainer.estimated_stepping_batches,
            "validation": trainer.num_val_batches,
            "is global zero": trainer.is_global_zero,
            "sanity": trainer.sanity_checking,
            "training": trainer.training,
        }


@feature(GROUP, "estimated_stepping_batches")
def estimated(here: Here) -> Report:
    results = _Results()
    return fitted(here, callbacks=[results]) | {"answers": results.answers}
