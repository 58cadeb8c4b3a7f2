"""The Trainer's flags: each fit, or validation, does what it does on one device."""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.features.columns import PIPELINES, Here
from tests.features.declared import add, by, feature
from tests.features.network import Loaders, Network, Report, fitted, weights

GROUP = "Trainer flags"
FLAGS: dict[str, dict[str, Any]] = {
    "max_epochs": {"max_epochs": 3},
    "max_epochs=0": {"max_epochs": 0},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "max_steps in a later epoch": {"max_steps": 6},
    "min_epochs with max_steps": {"min_epochs": 2, "max_steps": 6, "max_epochs": None},
    "min_steps": {"min_steps": 6, "max_epochs": 1},
    "max_time": {"max_time": timedelta(hours=1)},
    "max_time of a dictionary": {"max_time": {"hours": 1}},
    "max_time that is over": {"max_time": timedelta(0)},
    "limit_train_batches of a number": {"limit_train_batches": 2},
    "limit_train_batches of a share": {"limit_train_batches": 0.5},
    "limit_train_batches=0": {"limit_train_batches": 0},
    "limit_val_batches": {"limit_val_batches": 1},
    "limit_val_batches=0": {"limit_val_batches": 0},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of a number": {"fast_dev_run": 3},
    "val_check_interval of a number": {"val_check_interval": 2},
    "val_check_interval of a share": {"val_check_interval": 0.25},
    "val_check_interval over epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "val_check_interval of a time": {"val_check_interval": timedelta(hours=1)},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2},
    "num_sanity_val_steps=0": {"num_sanity_val_steps": 0},
    "num_sanity_val_steps=-1": {"num_sanity_val_steps": -1},
    "log_every_n_steps": {"log_every_n_steps": 1},
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": "warn"},
    "benchmark": {"benchmark": True},
    "inference_mode=False": {"inference_mode": False},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "barebones": {"barebones": True, "max_epochs": 2},
    "enable_autolog_hparams=False": {"enable_autolog_hparams": False},
    "enable_model_summary": {"enable_model_summary": True},
    "enable_progress_bar": {"enable_progress_bar": True},
    "enable_checkpointing": {"enable_checkpointing": True},
    "precision=64-true": {"precision": "64-true"},
}


def _fit(flags: dict[str, Any], here: Here) -> Report:
    return fitted(here, **flags)


for _title, _flags in FLAGS.items():
    add(GROUP, _title, partial(_fit, _flags))
for _precision in ("bf16-true", "bf16-mixed"):
    add(GROUP, f"precision={_precision}", partial(_fit, {"precision": _precision}), rtol=0.1)


@feature(GROUP, "accumulate_grad_batches")
def accumulate(here: Here) -> Report:
    return fitted(here, accumulate_grad_batches=2)


@feature(GROUP, "accumulate_grad_batches with a rest")
def accumulate_with_rest(here: Here) -> Report:
    return fitted(here, accumulate_grad_batches=3)


@feature(GROUP, "gradient_clip_val by norm", own=("local_sgd",))
def clip_norm(here: Here) -> Report:
    return fitted(here, gradient_clip_val=0.05)


@feature(GROUP, "gradient_clip_val by value", own=("local_sgd",))
def clip_value(here: Here) -> Report:
    return fitted(here, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@feature(GROUP, "precision=16-true")
def half(here: Here) -> Report:
    report = fitted(here, precision="16-true", num_sanity_val_steps=0)
    return {key: report[key] for key in ("step", "hooks")}


class _Overfitting(Loaders):
    val_dataloader = Loaders.train_dataloader


@feature(GROUP, "overfit_batches")
def overfit(here: Here) -> Report:
    return fitted(here, data=_Overfitting(here), overfit_batches=2)


@feature(GROUP, "limit_test_batches")
def limit_test(here: Here) -> Report:
    trainer = here.trainer(limit_test_batches=1)
    return {"tested": trainer.test(Network(), datamodule=Loaders(here), verbose=False)}


@feature(GROUP, "limit_predict_batches")
def limit_predict(here: Here) -> Report:
    trainer = here.trainer(limit_predict_batches=1)
    outputs = trainer.predict(Network(), datamodule=Loaders(here))
    return {"all": torch.cat(outputs)}


class _Normed(Network):
    """Has a batch norm before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return super().forward(self.norm(x))


@feature(
    GROUP,
    "sync_batchnorm",
    refused=by("local_sgd", "sync_batchnorm") | by(PIPELINES, "sync_batchnorm"),
)
def sync_batchnorm(here: Here) -> Report:
    return fitted(here, _Normed(), sync_batchnorm=True)


@feature(GROUP, "use_distributed_sampler=False")
def own_sampler(here: Here) -> Report:
    return fitted(here, use_distributed_sampler=False, limit_val_batches=0)


@feature(GROUP, "default_root_dir")
def root_dir(here: Here) -> Report:
    root = here.folder / "root"
    trainer = here.trainer(default_root_dir=root, enable_checkpointing=True, max_epochs=1)
    trainer.fit(Network(), datamodule=Loaders(here))
    return {"files": sorted(str(path.relative_to(root)) for path in root.rglob("*.ckpt"))}


@feature(GROUP, "init_module")
def init_module(here: Here) -> Report:
    trainer = here.trainer(precision="64-true")
    with trainer.init_module():
        module = Network()
    dtype = str(next(module.parameters()).dtype)
    trainer.fit(module, datamodule=Loaders(here))
    return {"dtype": dtype, "weights": weights(module)}
