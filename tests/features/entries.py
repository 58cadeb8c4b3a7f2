"""Data, and the Trainer's other entry points: validate, test, predict, Tuner."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from tests.features.columns import COLUMNS, GLOBAL_BATCH, Here
from tests.features.declared import add, by, feature
from tests.features.network import (
    Loaders,
    Network,
    Report,
    dataset,
    dealt,
    fitted,
    left_by,
    loader,
    weights,
)

GROUP = "Data and entry points"


def _entry(name: str, here: Here) -> Report:
    trainer = here.trainer()
    return {"logged": getattr(trainer, name)(Network(), datamodule=Loaders(here), verbose=False)}


add(GROUP, "validate", partial(_entry, "validate"))
add(GROUP, "test", partial(_entry, "test"))


@feature(GROUP, "predict")
def predict(here: Here) -> Report:
    outputs = here.trainer().predict(Network(), datamodule=Loaders(here))
    return {"first": outputs[0][0], "batches": len(outputs)}


@feature(GROUP, "fit, validate, test and predict with one Trainer")
def all_entries(here: Here) -> Report:
    trainer, module, data = here.trainer(), Network(), Loaders(here)
    trainer.fit(module, datamodule=data)
    validated = trainer.validate(module, datamodule=data, verbose=False)
    tested = trainer.test(module, datamodule=data, verbose=False)
    first = trainer.predict(module, datamodule=data)[0][0]
    return {"validated": validated, "tested": tested, "first": first, "weights": weights(module)}


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
        return dealt(self._here, self.trainer, 4)

    def val_dataloader(self) -> Any:
        return loader(self._here, 2, seed=2)


@feature(GROUP, "loaders of the module")
def loaders_of_the_module(here: Here) -> Report:
    trainer, module = here.trainer(), _OwnLoaders(here)
    trainer.fit(module)
    return left_by(trainer, module)


@feature(GROUP, "loaders given to fit")
def loaders_given(here: Here) -> Report:
    trainer, module = here.trainer(limit_train_batches=2, max_epochs=1), _Seen()
    trainer.fit(module, loader(here, 4), loader(here, 2, seed=2))
    return {"step": trainer.global_step}


class _Seen(Network):
    """Notes the samples of an epoch by their first feature, of all ranks."""

    seen: Any = None

    def on_train_epoch_start(self) -> None:
        self.parts: list[torch.Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.parts.append(batch[0][:, 0])

    def on_train_epoch_end(self) -> None:
        self.seen = torch.cat(self.parts)


class _Shuffled(Loaders):
    def train_dataloader(self) -> Any:
        return loader(self.here, 4, shuffle=True)


@feature(GROUP, "shuffle=True")
def shuffled(here: Here) -> Report:
    module = _SeenByAll()
    fitted(here, module, data=_Shuffled(here), max_epochs=1)
    return {"samples of the epoch": module.seen}


class _SeenByAll(_Seen):
    """Sees every sample of an epoch once, on whichever rank."""

    def on_train_epoch_end(self) -> None:
        self.seen = self.all_gather(torch.cat(self.parts)).flatten().unique()


class _Predicting(Loaders):
    """One sample more than full batches hold."""

    def predict_dataloader(self) -> Any:
        whole = dataset(GLOBAL_BATCH + 1, seed=2)
        return DataLoader(whole, batch_size=self.here.column.batch_size)


@feature(GROUP, "predict of uneven batches")
def uneven(here: Here) -> Report:
    outputs = here.trainer().predict(Network(), datamodule=_Predicting(here))
    return {"first": outputs[0][0]}


class _Stream(IterableDataset):
    """The samples of a rank, one after the other, without a length."""

    def __init__(self, here: Here, num_samples: int) -> None:
        self.here, self.num_samples = here, num_samples

    def __iter__(self) -> Any:
        ranks = self.here.column.num_batches
        rank = torch.distributed.get_rank() % ranks if ranks > 1 else 0
        whole = dataset(self.num_samples)
        yield from (whole[index] for index in range(rank, self.num_samples, ranks))


class _Streaming(Loaders):
    def train_dataloader(self) -> Any:
        return DataLoader(_Stream(self.here, 32), batch_size=self.here.column.batch_size)


@feature(GROUP, "IterableDataset", refused=by("elastic", "got a stream"))
def stream(here: Here) -> Report:
    return fitted(here, data=_Streaming(here))


def _combined(mode: str, here: Here) -> Report:
    class Combined(Loaders):
        def train_dataloader(self) -> Any:
            parts = {
                "long": dealt(here, self.trainer, 4),
                "short": dealt(here, self.trainer, 2, seed=3),
            }
            return CombinedLoader(parts, mode)

    return fitted(here, _OfSeveral(), data=Combined(here))


class _OfSeveral(Network):
    """Takes batches of several loaders at once, in one call of the network."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        whole = [torch.cat(entries) for entries in zip(*parts, strict=True)]
        return super().training_step(whole, batch_idx)


SEVERAL = by("elastic", "several|one training loader|CombinedLoader")
for _mode in ("max_size_cycle", "min_size", "max_size"):
    add(GROUP, f'CombinedLoader(mode="{_mode}")', partial(_combined, _mode), refused=SEVERAL)


class _ByLoader(Network):
    """Logs the loss of each validation loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


@feature(GROUP, 'CombinedLoader(mode="sequential") of validation')
def sequential(here: Here) -> Report:
    class Sequential(Loaders):
        def val_dataloader(self) -> Any:
            return CombinedLoader([loader(here, 2, seed=2), loader(here, 1, seed=3)], "sequential")

    return fitted(here, _ByLoader(), data=Sequential(here))


@feature(GROUP, "a dictionary of training loaders", refused=SEVERAL)
def dictionary(here: Here) -> Report:
    class Several(Loaders):
        def train_dataloader(self) -> Any:
            return {
                "one": dealt(here, self.trainer, 4),
                "two": dealt(here, self.trainer, 4, seed=3),
            }

    return fitted(here, _OfSeveral(), data=Several(here))


class _OwnBatches(Loaders):
    """Has a batch sampler of its own."""

    def train_dataloader(self) -> Any:
        sampler = dealt(self.here, self.trainer, 4).sampler
        batches = BatchSampler(sampler, self.here.column.batch_size, drop_last=True)
        return DataLoader(sampler.dataset, batch_sampler=batches)


@feature(GROUP, "batch_sampler")
def batch_sampler(here: Here) -> Report:
    return fitted(here, data=_OwnBatches(here), use_distributed_sampler=False, limit_val_batches=0)


class _Sizes(Network):
    """Notes how large the batches are."""

    def on_train_start(self) -> None:
        self.sizes: set[int] = set()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sizes.add(len(batch[0]))


@feature(GROUP, "batch_sampler that the Trainer deals")
def dealt_batch_sampler(here: Here) -> Report:
    module = _Sizes()
    trainer = here.trainer(max_epochs=1)
    trainer.fit(module, datamodule=_OwnBatches(here))
    sizes = [size * here.column.num_batches for size in module.sizes]
    return {"global batches": sizes, "step": trainer.global_step}


@feature(GROUP, "a sampler of one's own")
def weighted(here: Here) -> Report:
    class Weighted(Loaders):
        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(3)
            whole = loader(here, 4).dataset
            sampler = WeightedRandomSampler([1.0] * 32, 32, generator=generator)
            return DataLoader(whole, here.column.batch_size, sampler=sampler)

    module = Network()
    trainer = here.trainer(max_epochs=1)
    trainer.fit(module, datamodule=Weighted(here))
    return {"step": trainer.global_step}


@feature(GROUP, "val_dataloader that returns []")
def empty_list(here: Here) -> Report:
    class Empty(Loaders):
        def val_dataloader(self) -> Any:
            return []

    return fitted(here, data=Empty(here))


@feature(GROUP, "no validation at all")
def no_validation(here: Here) -> Report:
    trainer, module = here.trainer(), _OnlyTraining(here)
    trainer.fit(module)
    return left_by(trainer, module)


class _OnlyTraining(Network):
    validation_step = None

    def __init__(self, here: Here) -> None:
        super().__init__()
        self._here = here

    def train_dataloader(self) -> Any:
        return dealt(self._here, self.trainer, 4)


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


class _Rated(Network):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


@feature(GROUP, "Tuner.lr_find", refused=by("elastic", "learning-rate finder"))
def lr_find(here: Here) -> Report:
    module = _Rated()
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
