"""Runs the user's module: on ranks with the user's own data, and again on recorded batches.

ranks, own data ──records──> batches of each rank ──joined──> one device
                                    └──────────────────────> ranks again, with one thing changed
"""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import Strategy

from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.launchers._copy import copy_with_functions
from lightning_shard.proving.batches import Join, join_batches
from lightning_shard.proving.changes import Change, share_storages
from lightning_shard.proving.quiet import QUIET_OPTIONS, quiet
from lightning_shard.proving.recorder import Recorder
from lightning_shard.proving.records import Run, Sink
from lightning_shard.proving.strategies import StrategyLike, for_replay, strategy_in_process

EXACT = "64-true"
"""The precision in which differences are told from rounding."""

_TAKEN = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "sync_batchnorm",
    "use_distributed_sampler",
    "callbacks",
    "inference_mode",
    "detect_anomaly",
)


class RunFailedError(Exception):
    """The user's own code has raised an error in a run, which is the cause of this one."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if `trainer_options` has what a proof cannot take.

    Raises:
        ConfigError: Naming the options that it takes.
    """
    unknown = [name for name in options if name not in _TAKEN]
    if unknown:
        raise ConfigError(
            f"prove(trainer_options=...) got {', '.join(sorted(unknown))}, expected options that "
            f"change what is trained: {', '.join(_TAKEN)}. The number of ranks, the precision and "
            f"the steps are arguments of prove itself."
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is proved.

    Attributes:
        module: The user's module, which stays as it is: runs work on copies.
        data: A data module, a loader, any iterable of batches, or None for the module's own.
        strategy: The strategy's name, itself, or what makes it.
        num_ranks: Ranks inside this process.
        num_steps: Number of optimizer steps to compare.
        precision: Lightning's precision string.
        seed: Seed of the random numbers that the runs draw.
        join: Makes one device's batch of those of the ranks.
        options: Options of the Trainer that change what is trained.
    """

    module: pl.LightningModule
    data: Any
    strategy: StrategyLike
    num_ranks: int
    num_steps: int = 3
    precision: str = "32-true"
    seed: int = 0
    join: Join = join_batches
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accumulate(self) -> int:
        """Batches of one optimizer step."""
        return int(self.options.get("accumulate_grad_batches", 1))

    def without_accumulation(self) -> "Subject":
        """Return the same, with one batch for each optimizer step."""
        return replace(self, options={**self.options, "accumulate_grad_batches": 1})

    def fresh_module(self, change: Change | None = None) -> pl.LightningModule:
        """Return a copy of the module as it was given, changed by `change`."""
        module: pl.LightningModule = copy_with_functions(self.module, {}, [self.module], ())
        if self.precision == EXACT:
            module.double()
        share_storages(module, self.module)
        if change is not None:
            change(module)
        return module

    def on_ranks(
        self,
        batches: Sequence[Sequence[Any]] | None = None,
        *,
        change: Change | None = None,
        strategy: StrategyLike | None = None,
        num_ranks: int | None = None,
    ) -> Run:
        """Run under the strategy.

        Args:
            batches: By rank of different samples its batches; None for the user's own data.
            change: Applied to the module before the run.
            strategy: Another strategy than the subject's.
            num_ranks: Another number of ranks.
        """
        number = num_ranks or self.num_ranks
        made = strategy_in_process(strategy or self.strategy, number)
        if batches is not None:
            made = for_replay(made, number)
        return self._fit(self.fresh_module(change), made, number, batches)

    def on_one_device(
        self,
        batches: Sequence[Any] | None,
        *,
        change: Change | None = None,
        seed: int | None = None,
    ) -> Run:
        """Run on one device on these batches, or on the user's own data."""
        given = None if batches is None else [batches]
        return self._fit(self.fresh_module(change), "auto", 1, given, seed)

    def joined(self, batches: Sequence[Sequence[Any]]) -> list[Any]:
        """Return one device's batches."""
        return [self.join(list(of_ranks)) for of_ranks in zip(*batches, strict=True)]

    def _fit(
        self,
        module: pl.LightningModule,
        strategy: Strategy | str,
        num_ranks: int,
        batches: Sequence[Sequence[Any]] | None,
        seed: int | None = None,
    ) -> Run:
        sink = Sink()
        options = {**QUIET_OPTIONS, "max_epochs": 1, **self.options}
        callbacks = copy.deepcopy(list(self.options.get("callbacks") or ()))
        recorder = Recorder(sink, self.accumulate)
        with quiet():
            _draw_from(self.seed if seed is None else seed)
            trainer = pl.Trainer(
                **{**options, "callbacks": [*callbacks, recorder]},
                strategy=strategy,
                devices=num_ranks,
                precision=self.precision,  # type: ignore[arg-type]
                limit_train_batches=self.num_steps * self.accumulate,
            )
            where = "on one device" if isinstance(strategy, str) else f"on {num_ranks} ranks"
            with _told(where):
                trainer.fit(module, **self._data(module, batches))
        if not sink.records or not sink.records[0].batches:
            raise ConfigError(
                f"{type(self.module).__name__} was given no batch to train on, so there is nothing "
                f"to compare. Pass data that has at least one batch for each rank."
            )
        return Run(records=[sink.records[rank] for rank in sorted(sink.records)])

    def _data(
        self, module: pl.LightningModule, batches: Sequence[Sequence[Any]] | None
    ) -> dict[str, Any]:
        is_module = isinstance(self.data, pl.LightningDataModule)
        if batches is None:
            data = copy.deepcopy(self.data) if is_module else self.data
            return {"datamodule": data} if is_module else {"train_dataloaders": data}
        owner = copy.deepcopy(self.data) if is_module else pl.LightningDataModule()
        owner.train_dataloader = partial(_replay, owner, batches)  # type: ignore[method-assign]
        return {"datamodule": owner}


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Tell errors of the user's code from those of this package."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        raise RunFailedError(f"{type(error).__name__} {where}: {error}") from error


class _Replay:
    """Gives recorded batches, each time copies, since a step may write into them."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter([copy.deepcopy(one) for one in self._batches])


def _replay(owner: pl.LightningDataModule, batches: Sequence[Sequence[Any]]) -> _Replay:
    assert owner.trainer is not None
    place = owner.trainer.distributed_sampler_kwargs or {"rank": 0}
    return _Replay(batches[place["rank"]])


def _draw_from(seed: int) -> None:
    """Let random numbers be drawn from this seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
