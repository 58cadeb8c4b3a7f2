"""Shows when each rank of a pipeline computed and waited: idle shares beside theory, pictures.

    rank 0   F0 F1 │wait│ B0 F2 │wait│ B1 ...     gathered after the batch, on one clock
    rank 1   │wait│ F0 B0 F1 B1 ...

A rank is idle when it is not in a forward or backward, from the first rank's first one to the last
rank's last. Three shares tell where idle time comes from:

    measured    the time that a rank waits, for messages too, and needs to post them
    replayed    the schedule with the measured duration of each computation, messages free
    theory      the closed form: stages alike, a backward takes twice a forward

On CUDA the clock is events in the rank's stream, so that nothing is synchronized before the batch
has ended; what the host does between them counts as idle.
"""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extras import missing
from lightning_shard.core.options import AtLeastOne, checked_options
from lightning_shard.core.reporting.output import plain_text
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.schedules import Action, Schedule
from lightning_shard.pipeline_parallel.simulation import replay, theoretical_idle_share
from lightning_shard.pipeline_parallel.timeline import Event, Timeline, save_chrome_trace, save_png
from lightning_shard.strategies.model_parallel import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
)


class ActionClock:
    """Takes the times of a rank's actions for `Pipeline.observer`; each rank must make one."""

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self._group = group
        self._uses_events = device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        group.barrier()
        self._origin = self._mark()
        if self._uses_events:
            self._origin.synchronize()
        self._seconds = perf_counter()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        """Take the time of the action inside."""
        begin = self._mark()
        yield
        self._marks.append((action, begin, self._mark()))

    def gather(self) -> Timeline:
        """Return all ranks' actions, on rank 0's clock; each rank must call.

        Processes of one host share a clock. The clocks of other hosts are aligned by a barrier,
        which ranks leave at times that differ by about the latency of a message.
        """
        if self._uses_events and self._marks:
            self._marks[-1][2].synchronize()
        events = [Event(one, *map(self._time, times)) for one, *times in self._marks]
        (host, origin, _), *_ = ranks = self._group.all_gather_object(
            (platform.node(), self._seconds, events)
        )
        rows = []
        for name, seconds, theirs in ranks:
            by = 0.0 if name == host else origin - seconds
            rows.append([Event(one, start + by, end + by) for one, start, end in theirs])
        return Timeline.of_rows(rows)

    def _mark(self) -> Any:
        if not self._uses_events:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _time(self, mark: Any) -> float:
        if not self._uses_events:
            return float(mark)
        return self._seconds + float(self._origin.elapsed_time(mark)) / 1e3


class IdleShares(NamedTuple):
    """The idle shares of one batch, 0 to 1: of each rank, and in theory one for all."""

    measured: tuple[float, ...]
    replayed: tuple[float, ...]
    theory: float

    @classmethod
    def of(cls, timeline: Timeline, schedule: Schedule) -> "IdleShares":
        """Compare a measured timeline with its schedule."""
        return cls(
            measured=timeline.idle_shares,
            replayed=replay(schedule, timeline.durations).idle_shares,
            theory=theoretical_idle_share(
                schedule.name,
                num_ranks=schedule.num_ranks,
                num_microbatches=schedule.num_microbatches,
                num_stages=schedule.num_stages,
            ).share,
        )


class PipelineTimeline(Callback):
    """Take timelines of a pipeline's training batches; print idle shares at the end of a fit.

    Logs `pipeline_idle_share`, the mean over the ranks, for every profiled batch, and writes
    `batch_<number>.png` and `.json` (for chrome://tracing or https://ui.perfetto.dev), of the
    first pipeline where there are several. Every rank must have this callback. A batch that is not
    profiled costs nothing.

    Args:
        folder: Directory in which the files are written; None for no files.
        every_n_steps: Number of batches from one that is profiled to the next. The first batch of
            a fit never is: in it the ranks agree on what they will send.
        formats: Formats of the files, "png" and "json"; "png" needs matplotlib.

    Raises:
        ConfigError: A number below 1, an unknown format, or no matplotlib; at set-up, when the
            Trainer's strategy is not a pipeline.
    """

    @checked_options
    def __init__(
        self,
        folder: str | Path | None = None,
        every_n_steps: AtLeastOne = 50,
        formats: Sequence[Literal["png", "json"]] = ("png", "json"),
    ) -> None:
        if folder is not None and "png" in formats and (lack := missing("matplotlib")):
            raise ConfigError(f"PipelineTimeline cannot draw: {lack}; or pass formats=['json'].")
        self._folder = None if folder is None else Path(folder)
        self._every_n_steps = every_n_steps
        self._formats = tuple(formats)
        self._num_batches = 0
        self._profile: tuple[int, ActionClock] | None = None  # of the batch of this number
        self._shares: list[IdleShares] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _pipelined(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_batches = 0
        self._shares = []

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._num_batches += 1
        if self._num_batches == 1 or self._num_batches % self._every_n_steps:
            return
        strategy = _pipelined(trainer)
        clock = ActionClock(strategy.along("pp"), strategy.root_device)
        self._profile = self._num_batches, clock
        strategy.pipeline.observer = clock

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        strategy, (number, clock) = _pipelined(trainer), profile
        strategy.pipeline.observer = None
        timeline = clock.gather()
        num_microbatches = 1 + max(event.action.microbatch for event in timeline.rows[0])
        self._shares.append(IdleShares.of(timeline, strategy.schedule(num_microbatches)))
        pl_module.log("pipeline_idle_share", timeline.idle_share)
        if strategy.is_global_zero and self._folder is not None:
            self._write(self._folder / f"batch_{number:06}", timeline)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shares:
            pl_module.print(render_idle_shares(self._shares))
        else:
            rank_zero_warn(
                f"PipelineTimeline has nothing to show: it takes every {self._every_n_steps}th "
                f"batch but the first, and this run had {self._num_batches}. Pass a smaller "
                f"every_n_steps."
            )

    def _write(self, path: Path, timeline: Timeline) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if "json" in self._formats:
            save_chrome_trace(timeline, path.with_suffix(".json"))
        if "png" in self._formats:
            save_png(timeline, path.with_suffix(".png"), title=path.name)


def render_idle_shares(batches: Sequence[IdleShares]) -> str:
    """Lay the medians over some batches out as a table, a row for each rank."""
    table = Table(title=f"Idle shares, median of {len(batches)} batches")
    for heading in ("rank", "measured", "replayed", "theory"):
        table.add_column(heading, justify="left" if heading == "rank" else "right")
    measured, replayed = (
        [median(of_rank) for of_rank in zip(*of_batches, strict=True)]
        for of_batches in ([one.measured for one in batches], [one.replayed for one in batches])
    )
    for rank, shares in enumerate(zip(measured, replayed, strict=True)):
        table.add_row(str(rank), *(f"{share:.1%}" for share in shares), "")
    table.add_section()
    means = (fmean(measured), fmean(replayed), median(one.theory for one in batches))
    table.add_row("mean", *(f"{share:.1%}" for share in means))
    return plain_text(table, width=100)


def _pipelined(trainer: Trainer) -> PipelineParallelStrategy | HybridParallelStrategy:
    strategy = trainer.strategy
    kinds = (PipelineParallelStrategy, HybridParallelStrategy)
    if not isinstance(strategy, kinds) or strategy.mesh.pp == 1:
        raise ConfigError(
            f"PipelineTimeline shows what the stages of a pipeline do, but there is no pipeline: "
            f"the Trainer's strategy is {type(strategy).__name__} over "
            f"{trainer.num_devices * trainer.num_nodes} ranks. Pass strategy='pipeline_parallel' "
            f"and two devices or more, or leave the callback out."
        )
    return strategy
