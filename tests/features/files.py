"""Checkpoints, resuming, loggers and profilers: the same files with the same contents."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

from tests.features.columns import COLUMNS, Here
from tests.features.declared import add, feature
from tests.features.network import Loaders, Network, Report, fitted, left_by, weights

GROUP = "Checkpoints, loggers and profilers"
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "ModelCheckpoint": {},
    "ModelCheckpoint(monitor, save_top_k)": {"monitor": "val_loss", "save_top_k": 2},
    "ModelCheckpoint(save_top_k=-1)": {"save_top_k": -1},
    "ModelCheckpoint(save_last)": {"save_last": True},
    "ModelCheckpoint(save_last='link')": {"save_last": "link"},
    "ModelCheckpoint(every_n_train_steps)": {"every_n_train_steps": 3, "save_top_k": -1},
    "ModelCheckpoint(every_n_epochs)": {"every_n_epochs": 2},
    "ModelCheckpoint(save_weights_only)": {"save_weights_only": True},
    "ModelCheckpoint(filename)": {"filename": "{epoch}-{val_loss:.3f}", "monitor": "val_loss"},
    "ModelCheckpoint(save_on_train_epoch_end)": {
        "save_on_train_epoch_end": True,
        "monitor": "loss",
    },
    "ModelCheckpoint(mode='max')": {"monitor": "val_loss", "mode": "max"},
}


def contents(path: Path) -> Report:
    """Return what of a checkpoint file is to be the same under every strategy."""
    file = torch.load(path, weights_only=False)
    states = file.get("optimizer_states", [])
    return {
        "keys": sorted(file.keys() - {"lightning_shard"}),  # elastic's own entry
        "weights": dict(file["state_dict"]),
        "step": file["global_step"],
        "epoch": file["epoch"],
        "hparams": dict(file["hyper_parameters"]),
        "optimizers": [dict(state["state"]) for state in states],
        "groups": [len(group["params"]) for state in states for group in state["param_groups"]],
    }


def _checkpoints(options: dict[str, Any], here: Here) -> Report:
    folder = here.folder / "files"
    report = fitted(here, callbacks=[ModelCheckpoint(folder, **options)])
    files = {path.name: contents(path) for path in sorted(folder.iterdir())}
    return report | {"files": files}


for _title, _options in CHECKPOINTS.items():
    add(GROUP, _title, partial(_checkpoints, _options))


class _MineError(Exception):
    """The user's own error."""


class _Raising(Callback):
    """Raises in the sixth step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            raise _MineError("of the sixth step")


def _fails(trainer: L.Trainer, module: Network, here: Here) -> str:
    try:
        trainer.fit(module, datamodule=Loaders(here))
    except _MineError as error:
        return str(error)
    return "nothing was raised"


@feature(GROUP, "OnExceptionCheckpoint")
def on_exception(here: Here) -> Report:
    saving = OnExceptionCheckpoint(here.folder, filename="failed")
    error = _fails(here.trainer(callbacks=[_Raising(), saving]), Network(), here)
    return {"error": error, "file": contents(here.folder / "failed.ckpt")}


@feature(GROUP, "ModelCheckpoint(save_on_exception)")
def save_on_exception(here: Here) -> Report:
    folder = here.folder / "files"
    saving = ModelCheckpoint(folder, save_on_exception=True)
    error = _fails(here.trainer(callbacks=[_Raising(), saving]), Network(), here)
    return {"error": error, "files": sorted(path.name for path in folder.iterdir())}


@feature(GROUP, "fit(ckpt_path=a path)")
def resume(here: Here) -> Report:
    first = here.trainer(max_epochs=1)
    first.fit(Network(), datamodule=Loaders(here))
    path = here.folder / "one.ckpt"
    first.save_checkpoint(path)
    again, module = here.trainer(), Network()
    again.fit(module, datamodule=Loaders(here), ckpt_path=path)
    return left_by(again, module)


@feature(
    GROUP,
    "fit(ckpt_path) in the middle of an epoch",
    own=tuple(COLUMNS),
    why="one device trains as many batches as were left, but begins with the epoch's first "
    "samples again; these train the samples that were left, as if never interrupted.",
)
def resume_in_the_middle(here: Here) -> Report:
    saving = ModelCheckpoint(here.folder, filename="middle", every_n_train_steps=3)
    here.trainer(max_steps=3, callbacks=[saving]).fit(Network(), datamodule=Loaders(here))
    again, module = here.trainer(), Network()
    again.fit(module, datamodule=Loaders(here), ckpt_path=here.folder / "middle.ckpt")
    return left_by(again, module)


def _resume(which: str, here: Here) -> Report:
    folder = here.folder / "files"
    saving = ModelCheckpoint(folder, save_last=True, monitor="val_loss")
    trainer, module = here.trainer(max_epochs=1, callbacks=[saving]), Network()
    trainer.fit(module, datamodule=Loaders(here))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=Loaders(here), ckpt_path=which)
    return left_by(trainer, module)


add(GROUP, 'fit(ckpt_path="last")', partial(_resume, "last"))
add(GROUP, 'fit(ckpt_path="best")', partial(_resume, "best"))


def _evaluate(entry: str, here: Here) -> Report:
    saving = ModelCheckpoint(here.folder / "files", monitor="val_loss")
    trainer, module = here.trainer(callbacks=[saving]), Network()
    trainer.fit(module, datamodule=Loaders(here))
    return {
        "logged": getattr(trainer, entry)(datamodule=Loaders(here), ckpt_path="best", verbose=False)
    }


add(GROUP, 'test(ckpt_path="best")', partial(_evaluate, "test"))
add(GROUP, 'validate(ckpt_path="best")', partial(_evaluate, "validate"))


@feature(GROUP, "fit(weights_only=False)")
def resume_all(here: Here) -> Report:
    first = here.trainer(max_epochs=1)
    first.fit(Network(), datamodule=Loaders(here))
    first.save_checkpoint(here.folder / "one.ckpt")
    again, module = here.trainer(), Network()
    again.fit(
        module, datamodule=Loaders(here), ckpt_path=here.folder / "one.ckpt", weights_only=False
    )
    return left_by(again, module)


@feature(GROUP, "trainer.save_checkpoint in a hook")
def save_in_hook(here: Here) -> Report:
    class Saving(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(here.folder / f"{trainer.current_epoch}.ckpt")

    report = fitted(here, callbacks=[Saving()])
    return report | {"file": contents(here.folder / "1.ckpt")}


@feature(GROUP, "load_from_checkpoint")
def load_from_checkpoint(here: Here) -> Report:
    trainer = here.trainer()
    trainer.fit(Network(lr=0.03), datamodule=Loaders(here))
    trainer.save_checkpoint(here.folder / "whole.ckpt")
    module = Network.load_from_checkpoint(here.folder / "whole.ckpt")
    return {"weights": weights(module), "lr": module.hparams.lr}


class _Extra(Network):
    """Puts an entry of its own into checkpoints."""

    found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = [
            sorted(checkpoint["state_dict"]),
            dict(checkpoint["hyper_parameters"]),
        ]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["extra"]


@feature(GROUP, "on_save_checkpoint, on_load_checkpoint")
def extra_entries(here: Here) -> Report:
    first = here.trainer(max_epochs=1)
    first.fit(_Extra(), datamodule=Loaders(here))
    first.save_checkpoint(here.folder / "extra.ckpt")
    again, module = here.trainer(), _Extra()
    again.fit(module, datamodule=Loaders(here), ckpt_path=here.folder / "extra.ckpt")
    return left_by(again, module) | {"found": module.found}


def _plugin(make: Any, here: Here) -> Report:
    folder = here.folder / "files"
    # Lightning's plugin may write a file after it was to be removed: here all are kept
    kept = ModelCheckpoint(folder, save_top_k=-1)
    report = fitted(here, callbacks=[kept], plugins=[make()])
    return report | {"files": {path.name: contents(path) for path in folder.iterdir()}}


add(GROUP, "plugins=AsyncCheckpointIO", partial(_plugin, AsyncCheckpointIO))
add(GROUP, "plugins=TorchCheckpointIO", partial(_plugin, TorchCheckpointIO))


@feature(GROUP, "CSVLogger")
def csv_logger(here: Here) -> Report:
    fitted(here, logger=CSVLogger(here.folder, name="logs", version=0), log_every_n_steps=1)
    rows = (here.folder / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    table = [row.split(",") for row in rows]
    values = [[float(cell) if cell else -1.0 for cell in row] for row in table[1:]]
    return {"columns": table[0], "rows": values}


@feature(GROUP, "several loggers")
def several_loggers(here: Here) -> Report:
    loggers = [CSVLogger(here.folder, name=name, version=0) for name in ("one", "two")]
    report = fitted(here, logger=loggers, log_every_n_steps=2)
    sizes = [len(path.read_text().splitlines()) for path in here.folder.rglob("metrics.csv")]
    return report | {"rows": sizes}


@feature(GROUP, "hyperparameters of a logger")
def logged_hyperparameters(here: Here) -> Report:
    fitted(here, Network(lr=0.03), logger=CSVLogger(here.folder, name="logs", version=0))
    return {"file": (here.folder / "logs" / "version_0" / "hparams.yaml").read_text()}


def _profiled(make: Any, here: Here) -> Report:
    profiler = make(here.folder)
    report = fitted(here, profiler=profiler, max_epochs=1)
    summary = profiler if isinstance(profiler, str) else profiler.summary()
    return report | {"has summary": bool(summary)}


PROFILERS: dict[str, Any] = {
    'profiler="simple"': lambda _: "simple",
    "SimpleProfiler": lambda folder: SimpleProfiler(folder, "simple"),
    "AdvancedProfiler": lambda folder: AdvancedProfiler(folder, "advanced"),
}
for _title, _make in PROFILERS.items():
    add(GROUP, _title, partial(_profiled, _make))


@feature(GROUP, "PyTorchProfiler")
def pytorch_profiler(here: Here) -> Report:
    profiler = PyTorchProfiler(here.folder, "torch", emit_nvtx=False, export_to_chrome=False)
    return fitted(here, profiler=profiler, max_epochs=1)
