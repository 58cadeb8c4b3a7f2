"""Data: loaders, samplers, streams and combinations of loaders."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from tests.features.columns import GLOBAL_BATCH, Here
from tests.features.declared import add, by, feature
from tests.features.network import (
    Loaders,
    Network,
    Report,
    assigned,
    dataset,
    fitted,
    left_by,
    loader,
)

GROUP = "Data"


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
        full = dataset(GLOBAL_BATCH + 1, seed=2)
        return DataLoader(full, batch_size=self.here.column.batch_size)


@feature(GROUP, "predict of uneven batches")
def uneven(here: Here) -> Report:
    outputs = here.trainer().predict(Network(), datamodule=_Predicting(here))
    return {"all": torch.cat(outputs)}


class _Stream(IterableDataset):
    """The samples of a rank, one after the other, without a length."""

    def __init__(self, here: Here, num_samples: int) -> None:
        self.here, self.num_samples = here, num_samples

    def __iter__(self) -> Any:
        ranks = self.here.column.num_batches
        rank = torch.distributed.get_rank() % ranks if ranks > 1 else 0
        full = dataset(self.num_samples)
        yield from (full[index] for index in range(rank, self.num_samples, ranks))


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
                "long": assigned(here, self.trainer, 4),
                "short": assigned(here, self.trainer, 2, seed=3),
            }
            return CombinedLoader(parts, mode)

    return fitted(here, _OfSeveral(), data=Combined(here))


class _OfSeveral(Network):
    """Takes batches of several loaders at once, in one call of the network."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        full = [torch.cat(entries) for entries in zip(*parts, strict=True)]
        return super().training_step(full, batch_idx)


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
                "one": assigned(here, self.trainer, 4),
                "two": assigned(here, self.trainer, 4, seed=3),
            }

    return fitted(here, _OfSeveral(), data=Several(here))


class _OwnBatches(Loaders):
    """Has a batch sampler of its own."""

    def train_dataloader(self) -> Any:
        sampler = assigned(self.here, self.trainer, 4).sampler
        batches = BatchSampler(sampler, self.here.column.batch_size, drop_last=True)
        return DataLoader(sampler.dataset, batch_sampler=batches)


@feature(GROUP, "batch_sampler")
def batch_sampler(here: Here) -> Report:
    return fitted(here, data=_OwnBatches(here), use_distributed_sampler=False, limit_val_batches=0)


class _BatchesOfAll(Loaders):
    """Has a batch sampler that knows of no ranks."""

    def train_dataloader(self) -> Any:
        full = loader(self.here, 4).dataset
        batches = BatchSampler(SequentialSampler(full), self.here.column.batch_size, True)
        return DataLoader(full, batch_sampler=batches)


@feature(GROUP, "batch_sampler that the Trainer deals")
def assigned_batch_sampler(here: Here) -> Report:
    return fitted(here, data=_BatchesOfAll(here))


@feature(GROUP, "a sampler of one's own")
def weighted(here: Here) -> Report:
    class Weighted(Loaders):
        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(3)
            full = loader(here, 4).dataset
            sampler = WeightedRandomSampler([1.0] * 32, 32, generator=generator)
            return DataLoader(full, here.column.batch_size, sampler=sampler)

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
        return assigned(self._here, self.trainer, 4)
