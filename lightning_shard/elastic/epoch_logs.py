"""A rank's logged values of this epoch, taken out of Lightning's collection and put back.

Sums over an epoch go back with the steps that are done again, and a newcomer must know what is
logged, since every rank takes part when the sums come together. Metric objects that a module logs
keep their own state and are left alone.

Private names of Lightning are touched here and in `_lightning`; checked with lightning 2.6.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoggedSum:
    """One value that is logged, summed up over the epoch.

    Attributes:
        how: The arguments of `log`, but for what belongs to one process.
        is_shared: Whether ranks reduce the value together.
        rank_zero_only: Whether rank 0 alone logs it.
        operation: The operation by which ranks reduce it.
        sums: The tensors in which the value is summed up.
        count: How often the value was logged.
        is_idle: Whether nothing has been logged since the last reset.
    """

    how: dict[str, Any]
    is_shared: bool
    rank_zero_only: bool
    operation: str | None
    sums: dict[str, Tensor]
    count: int
    is_idle: bool

    @classmethod
    def of(cls, metric: _ResultMetric) -> "LoggedSum":
        """Copy what one of Lightning's metrics has summed up."""
        sync = metric.meta.sync
        return cls(
            how={
                one.name: getattr(metric.meta, one.name)
                for one in fields(metric.meta)
                if one.name != "_sync"
            },
            is_shared=sync.should,
            rank_zero_only=sync.rank_zero_only,
            operation=sync.op,
            sums={name: getattr(metric, name).detach().cpu().clone() for name in metric._defaults},
            count=metric._update_count,
            is_idle=metric.has_reset,
        )

    def put_into(self, metric: _ResultMetric, *, emptied: bool) -> None:
        """Set a metric's sums, or none of them where it is to be `emptied`."""
        if emptied:
            metric.reset()
        else:
            for name, value in self.sums.items():
                setattr(metric, name, value.to(getattr(metric, name).device))
        # Without values, too: all ranks must take part where sums come together.
        metric._update_count, metric.has_reset = self.count, self.is_idle
        metric._computed = None

    def made(self, reduce: Callable[..., Any]) -> _ResultMetric:
        """Make a metric that logs alike, without a value.

        Args:
            reduce: The strategy's method `reduce`.
        """
        meta = _Metadata(**self.how)
        meta.sync = _Sync(
            fn=reduce,
            _should=self.is_shared,
            rank_zero_only=self.rank_zero_only,
            _op=self.operation,
        )
        return _ResultMetric(meta, is_tensor=True)


EpochLogs = dict[str, LoggedSum]


def _results(trainer: "pl.Trainer") -> _ResultCollection:
    results = trainer.fit_loop.epoch_loop._results
    assert results is not None
    return results


def take_logs(trainer: "pl.Trainer") -> EpochLogs:
    """Return what this rank has logged in this epoch, by Lightning's keys."""
    results = _results(trainer)
    return {key: LoggedSum.of(metric) for key, metric in results.items() if metric.is_tensor}


def put_logs(
    trainer: "pl.Trainer", logs: EpochLogs, *, reduce: Callable[..., Any], emptied: bool
) -> None:
    """Have a fit hold these logged values and no others.

    Args:
        trainer: The Trainer, in its fit.
        logs: What this rank, or another one, has logged.
        reduce: The strategy's method `reduce`.
        emptied: Take only what is logged and how: the sums are another rank's.
    """
    results = _results(trainer)
    for key in [key for key, metric in results.items() if metric.is_tensor and key not in logs]:
        del results[key]
    for key, logged in logs.items():
        if key not in results:
            results[key] = logged.made(reduce)
        logged.put_into(results[key], emptied=emptied)
