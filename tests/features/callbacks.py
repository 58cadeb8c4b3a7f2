"""Lightning's callbacks: each fit with one leaves what it leaves on one device."""

from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.features.columns import COLUMNS, Here
from tests.features.declared import add, by, feature
from tests.features.network import (
    CountsBatches,
    Loaders,
    Network,
    Report,
    WithRate,
    fitted,
    left_by,
)

GROUP = "Callbacks"
AVERAGES = by("elastic", "averages that are lost") | by(
    "local_sgd", "would average each rank's own weights"
)


def _with(make: Any, flags: dict[str, Any], here: Here) -> Report:
    return fitted(here, callbacks=[make()], **flags)


SIMPLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "ModelSummary": (lambda: ModelSummary(max_depth=2), {}),
    "RichModelSummary": (RichModelSummary, {}),
    "RichProgressBar": (RichProgressBar, {"enable_progress_bar": True}),
    "TQDMProgressBar": (lambda: TQDMProgressBar(refresh_rate=2), {"enable_progress_bar": True}),
    "Timer": (lambda: Timer(duration=timedelta(hours=1)), {}),
    "Timer that is over": (lambda: Timer(duration=timedelta(0)), {}),
    "Timer by epochs": (lambda: Timer(duration=timedelta(0), interval="epoch"), {}),
    "EarlyStopping": (lambda: EarlyStopping("val_loss", patience=0, min_delta=1.0), {}),
    "EarlyStopping by the training loss": (
        lambda: EarlyStopping("loss", patience=0, min_delta=1.0, check_on_train_epoch_end=True),
        {},
    ),
    "EarlyStopping at a threshold": (
        lambda: EarlyStopping("val_loss", stopping_threshold=10.0),
        {},
    ),
}
for _title, (_make, _flags) in SIMPLE.items():
    add(GROUP, _title, partial(_with, _make, _flags))

add(
    GROUP,
    "StochasticWeightAveraging",
    partial(
        _with,
        lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1),
        {"max_epochs": 3},
    ),
    refused=AVERAGES,
)
add(
    GROUP,
    "WeightAveraging",
    partial(_with, lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5)), {}),
    refused=AVERAGES,
)
add(
    GROUP,
    "EMAWeightAveraging",
    partial(_with, lambda: EMAWeightAveraging(decay=0.5), {}),
    refused=AVERAGES,
)
add(
    GROUP,
    "ModelPruning",
    partial(_with, lambda: ModelPruning("l1_unstructured", amount=0.5), {}),
    refused=by(
        ("tensor_parallel", "pipeline_parallel", "hybrid_parallel"),
        "takes parameters out of their modules during the fit",
    )
    | by("elastic", "unfreezes or prunes parameters during the training"),
)
add(
    GROUP,
    "GradientAccumulationScheduler",
    partial(_with, lambda: GradientAccumulationScheduler({0: 1, 1: 2}), {}),
    refused=by("elastic", "would both set how many batches"),
)


class _Unfrozen(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(
            unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, backbone_initial_lr=0.01
        )


class _Freezing(BaseFinetuning):
    """Trains the head alone, from the second epoch on everything."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


for _finetuning in (_Unfrozen, _Freezing):
    add(
        GROUP,
        _finetuning.__bases__[0].__name__,
        partial(_with, _finetuning, {"max_epochs": 3}),
        refused=by("elastic", "unfreezes or prunes parameters during the training"),
    )


@feature(GROUP, "LearningRateMonitor")
def learning_rate_monitor(here: Here) -> Report:
    monitor = LearningRateMonitor("step", log_momentum=True)
    logger = CSVLogger(here.folder)
    report = fitted(here, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    return report | {"rates": {name: list(rates) for name, rates in monitor.lrs.items()}}


@feature(GROUP, "DeviceStatsMonitor")
def device_stats(here: Here) -> Report:
    logger = CSVLogger(here.folder)
    return fitted(
        here, callbacks=[DeviceStatsMonitor(cpu_stats=False)], logger=logger, log_every_n_steps=1
    )


@feature(GROUP, "ThroughputMonitor")
def throughput(here: Here) -> Report:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    logger = CSVLogger(here.folder)
    report = fitted(here, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    logger.experiment.save()
    rows = (here.folder / "lightning_logs").rglob("metrics.csv")
    heads = {name for path in rows for name in path.read_text().splitlines()[0].split(",")}
    return report | {"logged": "train|device/batches_per_sec" in heads}


@feature(GROUP, "LambdaCallback")
def lambda_callback(here: Here) -> Report:
    seen: list[int] = []

    def note(trainer: L.Trainer, module: L.LightningModule) -> None:
        seen.append(trainer.current_epoch)

    return fitted(here, callbacks=[LambdaCallback(on_train_epoch_end=note)]) | {"first": seen[0]}


@feature(GROUP, "a callback with a state")
def stateful(here: Here) -> Report:
    first = here.trainer(max_epochs=1, callbacks=[CountsBatches()])
    first.fit(Network(), datamodule=Loaders(here))
    path = here.folder / "state.ckpt"
    first.save_checkpoint(path)
    counter = CountsBatches()
    report = fitted(here, callbacks=[counter], ckpt_path=path)
    return report | {"batches": counter.batches}


@feature(GROUP, "LearningRateFinder", refused=by("elastic", "learning-rate finder"))
def learning_rate_finder(here: Here) -> Report:
    finder = LearningRateFinder(
        min_lr=1e-3, max_lr=0.1, num_training_steps=6, early_stop_threshold=None, attr_name="lr"
    )
    module = WithRate()
    report = fitted(here, module, callbacks=[finder], max_epochs=1, num_sanity_val_steps=0)
    return report | {"rates": finder.optimal_lr.results["lr"], "chosen": module.lr}


class _Sized(Loaders):
    """Its batch size is an attribute, which a finder may set."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.batch_size = 1

    def train_dataloader(self) -> Any:
        full = super().train_dataloader()
        return torch.utils.data.DataLoader(
            full.dataset, batch_size=self.batch_size, sampler=full.sampler
        )


@feature(
    GROUP,
    "BatchSizeFinder",
    refused=by(tuple(COLUMNS), "Batch size finder is not supported with distributed strategies"),
)
def batch_size_finder(here: Here) -> Report:
    finder = BatchSizeFinder(steps_per_trial=1, init_val=1, max_trials=2)
    data = _Sized(here)
    trainer = here.trainer(max_epochs=1, callbacks=[finder])
    trainer.fit(Network(), datamodule=data)
    return {
        "size": data.batch_size,
        "step": trainer.global_step * data.batch_size * (here.column.num_batches),
    }


class _Writer(BasePredictionWriter):
    """Writes what a rank predicts to a file of its own."""

    def __init__(self, folder: Any, interval: str) -> None:
        super().__init__(write_interval=interval)
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, idx: int, _: int
    ) -> None:
        torch.save((indices, prediction), self.folder / f"{trainer.global_rank}-{idx}.pt")

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        for idx, (prediction, indices) in enumerate(
            zip(predictions, batch_indices[0], strict=True)
        ):
            torch.save((indices, prediction), self.folder / f"{trainer.global_rank}-{idx}.pt")


def _predict(interval: str, here: Here) -> Report:
    folder = here.folder / "predictions"
    folder.mkdir()
    trainer = here.trainer(callbacks=[_Writer(folder, interval)])
    trainer.predict(Network(), datamodule=Loaders(here), return_predictions=False)
    by_sample: dict[int, Any] = {}
    for path in folder.iterdir():
        indices, prediction = torch.load(path)
        by_sample.update(zip(indices, prediction, strict=True))
    return {"samples": [by_sample[index] for index in sorted(by_sample)]}


add(GROUP, "BasePredictionWriter of batches", partial(_predict, "batch"))
add(GROUP, "BasePredictionWriter of an epoch", partial(_predict, "epoch"))


class _Stopping(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.should_stop = True


@feature(GROUP, "trainer.should_stop")
def should_stop(here: Here) -> Report:
    return fitted(here, callbacks=[_Stopping()])


@feature(GROUP, "configure_callbacks")
def configured(here: Here) -> Report:
    module = _Configuring()
    trainer = here.trainer()
    trainer.fit(module, datamodule=Loaders(here))
    return left_by(trainer, module)


class _Configuring(Network):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=0, min_delta=1.0)]
