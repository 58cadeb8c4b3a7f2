"""What a rank has logged in this epoch, taken out of Lightning's collection and put back.

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
        is_shared: Whether it is brought together over ranks.
        rank_zero_only: Lightning's.
        operation: By which it is brought together.
        sums: The tensors.
        count: Of updates.
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
        """Take it out."""
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
        """Set the sums, or none of them."""
        if emptied:
            metric.reset()
        else:
            for name, value in self.sums.items():
                setattr(metric, name, value.to(getattr(metric, name).device))
        # Without values, too: all ranks must take part where sums come together.
        metric._update_count, metric.has_reset = self.count, self.is_idle
        metric._computed = None

    def made(self, reduce: Callable[..., Any]) -> _ResultMetric:
        """Make it without a value.

        Args:
            reduce: The strategy's.
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
    """What has been logged, by Lightning's keys."""
    results = _results(trainer)
    return {key: LoggedSum.of(metric) for key, metric in results.items() if metric.is_tensor}


def put_logs(
    trainer: "pl.Trainer", logs: EpochLogs, *, reduce: Callable[..., Any], emptied: bool
) -> None:
    """Have a fit hold this and no more.

    Args:
        trainer: In its fit.
        logs: From this rank, or from another.
        reduce: The strategy's.
        emptied: Take only what is logged and how: the sums are another rank's.
    """
    results = _results(trainer)
    for key in [key for key, metric in results.items() if metric.is_tensor and key not in logs]:
        del results[key]
    for key, logged in logs.items():
        if key not in results:
            results[key] = logged.made(reduce)
        logged.put_into(results[key], emptied=emptied)
