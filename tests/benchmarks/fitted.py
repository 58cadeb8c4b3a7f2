"""Contenders that train as users do: Lightning's Trainer, under our strategies and its own.

    benchmark's thread   step(batch) ──┐                                     ┌──> its loss
    fit's thread                       └─ batch, step, hooks, next batch? ───┘

A fit runs on a thread of its own, which gets its next batch when a step is asked for, so that it
takes turns with all others in the same process. A step ends when its loop asks for another batch.
Loop, callbacks, precision plugin and the strategy's hooks are what it costs beside the bare engine.
"""

import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from tests.benchmarks.contenders import ADAMW, Contender, Phase
from tests.benchmarks.model import Batch
from tests.benchmarks.ranks import own_device
from tests.trainers import SILENT

_MANY = 1_000_000  # steps: a loader without a length is read one batch ahead


class Fitted(Contender):
    """A Trainer's fit."""

    def __init__(self, model: nn.Module, *, strategy: Callable[[], Any]) -> None:
        self.module = model
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._last = _KeepsLoss()
        self._strategy = strategy
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._has_begun = False

    def _fit(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._trainer().fit(self._trained(), _Asked(self._asked, self._batches))
        except BaseException as error:
            self._asked.put(error)

    def _trained(self) -> pl.LightningModule:
        is_whole = isinstance(self.module, pl.LightningModule)
        return self.module if is_whole else _Module(self.module)

    def _trainer(self) -> pl.Trainer:
        return pl.Trainer(
            strategy=self._strategy(),
            accelerator="cpu" if own_device().type == "cpu" else "gpu",
            devices=dist.get_world_size(),
            plugins=[_AlreadyThere()],
            callbacks=[self._last],
            max_epochs=1,
            **SILENT,
            use_distributed_sampler=False,
        )

    def shard(self, model: nn.Module) -> torch.optim.Optimizer:
        """Refuse: the strategy does it, when the fit begins."""
        raise NotImplementedError

    def step(self, batch: Batch, phase: Phase | None = None) -> Tensor:
        """Let the fit take a step; every rank calls."""
        if not self._has_begun:  # ranks begin one fit after the other
            self._has_begun = True
            self._thread.start()
            self._wait()
        self._batches.put(batch)
        self._wait()
        return self._last.loss

    def _wait(self) -> None:
        error = self._asked.get()
        if error is not None:
            raise error

    def parameters(self) -> Iterable[Tensor]:
        """Yield nothing: memory is measured of the engine alone."""
        return ()

    gradients = states = parameters


class _Module(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class _Asked:
    """A loader of the batches that come through a queue, which tells when it is asked for one."""

    def __init__(
        self,
        asked: "queue.SimpleQueue[BaseException | None]",
        batches: "queue.SimpleQueue[Batch | None]",
    ) -> None:
        self._asked, self._batches = asked, batches

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._asked.put(None)
            batch = self._batches.get()
            if batch is None:
                return
            yield batch


class _KeepsLoss(Callback):
    """Keeps the loss of the last step."""

    loss: Tensor

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.loss = outputs["loss"].detach()


class _AlreadyThere(LightningEnvironment):
    """Tells a fit that its rank, and the group of all ranks, are there."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None: ...
