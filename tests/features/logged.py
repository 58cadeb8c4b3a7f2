"""`self.log` and torchmetrics: the values that callbacks and loggers see."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from tests.features.columns import Here
from tests.features.declared import add, feature
from tests.features.network import Loaders, Network, Report, fitted, loader

GROUP = "Logging"
OPTIONS: dict[str, dict[str, Any]] = {
    "log(on_step, on_epoch)": {"on_step": True, "on_epoch": True, "sync_dist": True},
    "log(on_epoch)": {"on_step": False, "on_epoch": True, "sync_dist": True},
    "log(prog_bar)": {"prog_bar": True, "sync_dist": True},
    "log(logger=False)": {"logger": False, "sync_dist": True},
    "log(reduce_fx='max')": {
        "on_step": False,
        "on_epoch": True,
        "reduce_fx": "max",
        "sync_dist": True,
    },
    "log(reduce_fx='min')": {
        "on_step": False,
        "on_epoch": True,
        "reduce_fx": "min",
        "sync_dist": True,
    },
    "log(batch_size)": {"on_epoch": True, "batch_size": 4, "sync_dist": True},
    "log(rank_zero_only)": {"rank_zero_only": True},
}


class _Logging(Network):
    """Logs the step's number, which all ranks have alike."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(batch_idx), **self._options)
        return super().training_step(batch, batch_idx)


def _log(options: dict[str, Any], here: Here) -> Report:
    return fitted(here, _Logging(options))


for _title, _options in OPTIONS.items():
    add(GROUP, _title, partial(_log, _options))


class _EpochLoss(Network):
    """Logs the loss averaged over an epoch, weighted by the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "twice": 2 * loss}, on_epoch=True, sync_dist=True)
        return loss


class _Sum(Network):
    """Sums over an epoch, and over the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        samples = float(len(batch[0]))
        self.log("sum", samples, on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class _Metric(Network):
    """Logs an object of torchmetrics, and a collection by values of `compute`."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.val_metrics = MetricCollection({"mse": MeanSquaredError(), "mean": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.error(outputs.detach(), batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return (outputs - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        self.val_metrics["mse"].update(outputs, batch[1])
        self.val_metrics["mean"].update(outputs.mean(1))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


class _Functional(Network):
    """Keeps outputs of a validation and logs their mean at its end."""

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.outputs).mean(), sync_dist=True)


class _Gathered(Network):
    """Gathers outputs of a validation from all ranks."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        full = self.all_gather(self(batch[0])).flatten(0, -2)
        self.log("largest", full.max(), reduce_fx="max")


MODULES = {"log_dict": _EpochLoss, "torchmetrics": _Metric, "all_gather in validation": _Gathered}


def _module(make: Any, here: Here) -> Report:
    return fitted(here, make())


for _title, _class in MODULES.items():
    add(GROUP, _title, partial(_module, _class))
add(GROUP, "log(reduce_fx='sum')", partial(_module, _Sum))
add(GROUP, "outputs of a validation", partial(_module, _Functional))


class _SeveralValidations(Loaders):
    def val_dataloader(self) -> Any:
        return [loader(self.here, 2, seed=2), loader(self.here, 1, seed=3)]


class _ByLoader(Network):
    def __init__(self, named: bool) -> None:
        super().__init__()
        self._named = named

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = "loss" if self._named else f"loss_of_{dataloader_idx}"
        self.log(name, self.loss(batch), sync_dist=True, add_dataloader_idx=self._named)


def _several(named: bool, here: Here) -> Report:
    return fitted(here, _ByLoader(named), data=_SeveralValidations(here))


add(GROUP, "several validation loaders", partial(_several, True))
add(GROUP, "log(add_dataloader_idx=False)", partial(_several, False))


class _Bar(Network):
    """Notes the metrics of the progress bar."""

    bar: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_train_end(self) -> None:
        self.bar = {name: float(value) for name, value in self.trainer.progress_bar_metrics.items()}


@feature(GROUP, "progress_bar_metrics")
def bar(here: Here) -> Report:
    module = _Bar()
    return fitted(here, module) | {"bar": module.bar}


class _Plot(Network):
    """Logs by the logger itself."""

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"mine": float(self.current_epoch)}, step=self.global_step)


@feature(GROUP, "logger.log_metrics of one's own")
def logger_of_ones_own(here: Here) -> Report:
    fitted(here, _Plot(), logger=CSVLogger(here.folder, name="logs", version=0))
    return {"rows": (here.folder / "logs/version_0/metrics.csv").read_text().count("\n")}
