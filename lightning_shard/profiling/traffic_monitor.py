"""Writes what ranks send in a step, by axis and operation, and what a dry run says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import OperationTraffic, Traffic
from lightning_shard.checkpoint.random_state import load_random_state, random_state
from lightning_shard.core._lightning import runners_of
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.core.options import AtLeastOne, checked_options
from lightning_shard.planning.dry_run import flops_of_batch
from lightning_shard.planning.report import DryRun
from lightning_shard.planning.simulated_model import NoElements
from lightning_shard.profiling.run_monitor import RunMonitor, own_strategy
from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.local_updates import LocalUpdates

T = TypeVar("T")

# What a run is expected to take, found on a copy of its module without elements.
#
#     setup           the module is full: rank 0 copies its shapes
#     first batch     its shapes are known: the copy takes a step, see `planning`
#
# A copy takes no memory and no arithmetic, and other ranks are not asked.


class Expectations:
    """What one rank finds out about a run before its first step, from the callbacks' `setup` on.

    `obstacles` says why something could not be found, by what it is.
    """

    def __init__(
        self, module: "pl.LightningModule", strategy: DataParallelStrategy, precision: str
    ) -> None:
        self.obstacles: dict[str, str] = {}
        self._strategy, self._precision = strategy, precision
        self._module: Any = self._unless_it_fails(
            "copy", lambda: NoElements().module(module, left_out=runners_of(module))
        )

    def flops(self, batch: Any) -> int | None:
        """Return the operations of a batch in forward and backward; None where it cannot run."""
        return self._found(
            "flops", lambda: flops_of_batch(self._module, _shapes(batch), self._precision)
        )

    def dry_run(self, batch: Any) -> DryRun | None:
        """Return the strategy's dry run with a batch; None where it cannot run."""
        return self._found(
            "dry run",
            lambda: self._strategy.dry_run(
                self._module,
                _shapes(batch),
                world_size=self._strategy.mesh_size,
                precision=self._precision,
            ),
        )

    def _found(self, what: str, find: Callable[[], T]) -> T | None:
        if self._module is None:
            self.obstacles[what] = self.obstacles["copy"]
            return None
        streams = random_state(self._strategy.root_device)
        try:
            return self._unless_it_fails(what, find)
        finally:
            load_random_state(streams, self._strategy.root_device)

    def _unless_it_fails(self, what: str, find: Callable[[], T]) -> T | None:
        """Return what is found; a monitored run must not end because a step asks for elements."""
        try:
            return find()
        except Exception as error:
            self.obstacles[what] = f"{type(error).__name__}: {error}"
            return None


def _shapes(batch: Any) -> Any:
    """Return a batch without elements."""
    return apply_to_collection(
        batch, Tensor, lambda one: torch.empty_like(one, device="meta") if one.ndim else one.cpu()
    )


# A rank's counters of traffic by axis of the mesh: what groups have counted, and since when.
#
#     group of ranks 0 2  ─┐  which differ on the axis dp only       dp      all_gather, ...
#     group of ranks 0 1  ─┼─ which differ on tp only            ──> tp      all_reduce, ...
#     group of all ranks  ─┘  which differ on dp and tp              dp+tp   broadcast, ...
#
# The counters are those of `backends.traffic`, which every `Collectives` has.

AxisTraffic = dict[str, dict[str, OperationTraffic]]
"""Counters by axis and operation."""


class AxisCounters:
    """Says what this rank has sent and waited since it was asked before."""

    def __init__(self, strategy: DataParallelStrategy) -> None:
        self._strategy = strategy
        self._counters: list[tuple[str, Traffic]] = []  # by axis
        self._before: dict[int, dict[str, OperationTraffic]] = {}  # by id of the counters
        self.look()
        self.since()

    def look(self) -> None:
        """Find the groups that there are now, of two ranks and more."""
        mesh = self._strategy.mesh
        found = [(axis_of(mesh, ranks), traffic) for ranks, traffic in Collectives.counters()]
        self._counters = [(axis, traffic) for axis, traffic in found if axis]
        alive = {id(traffic) for _, traffic in self._counters}
        self._before = {key: before for key, before in self._before.items() if key in alive}

    def since(self) -> AxisTraffic:
        """Return the counters since the last call."""
        found = AxisTraffic()
        for axis, traffic in self._counters:
            before, now = self._before.get(id(traffic), {}), traffic.snapshot()
            self._before[id(traffic)] = now
            for operation, counters in now.items():
                more = _difference(counters, before.get(operation, OperationTraffic()))
                if more.calls or more.seconds:
                    add_to(found, {axis: {operation: more}})
        return self._without_mail(found)

    def _without_mail(self, found: AxisTraffic) -> AxisTraffic:
        """Leave out the time that threads of asynchronous SGD wait beside this rank's work."""
        if isinstance(self._strategy, AsyncSGDStrategy):
            for operations in found.values():
                if "recv" in operations:
                    operations["recv"].seconds = operations["recv"].seconds_waited = 0.0
        return found


def add_to(total: AxisTraffic, more: AxisTraffic) -> None:
    """Add counters to others."""
    for axis, operations in more.items():
        own = total.setdefault(axis, {})
        for operation, counters in operations.items():
            own[operation] = own.get(operation, OperationTraffic()) + counters


def waited(traffic: AxisTraffic) -> dict[str, float]:
    """Return the seconds of waiting for peers by axis."""
    return {
        axis: sum(one.seconds_waited for one in operations.values())
        for axis, operations in traffic.items()
    }


def seconds_in(traffic: AxisTraffic) -> float:
    """Return the seconds in which the rank could do nothing else, waiting included."""
    return sum(one.seconds for operations in traffic.values() for one in operations.values())


def axis_of(mesh: ParallelMesh, ranks: tuple[int, ...]) -> str:
    """Return the axes on which a group's ranks differ, such as "dp" or "pp+tp"."""
    if max(ranks, default=0) >= mesh.world_size:
        return "other"
    places = [mesh.coordinates(rank) for rank in ranks]
    return "+".join(axis for axis in mesh.axes if len({place[axis] for place in places}) > 1)


def _difference(now: OperationTraffic, before: OperationTraffic) -> OperationTraffic:
    """Return what has come since; all of it where the group was made anew meanwhile."""
    return now if now.calls < before.calls else now - before


class TrafficMonitor(RunMonitor):
    """Write what each rank sends from the beginning of a batch to its end, into the run's folder.

    Bytes are those of a ring, as everywhere in this package. Before the first step rank 0 takes the
    strategy's dry run on a copy of the module without elements, and writes what it says. Loggers
    get rank 0's bytes of a step as `monitor/sent_bytes/dp` and so on.

    Args:
        folder: Folder of the run; None takes the first logger's, or the Trainer's
            `default_root_dir` without loggers.
        every_n_steps: Number of optimizer steps that are counted together.
        dry_run: Whether to take the dry run, which needs a `training_step` that asks for the
            shapes of tensors only.

    Raises:
        ConfigError: A number below 1; at set-up, another package's strategy, or an elastic one
            without a folder.
    """

    @checked_options
    def __init__(
        self, folder: str | Path | None = None, every_n_steps: AtLeastOne = 10, dry_run: bool = True
    ) -> None:
        super().__init__(folder)
        self._every_n_steps, self._takes_dry_run = every_n_steps, dry_run
        self._forget()

    def _forget(self) -> None:
        self._counters: AxisCounters | None = None
        self._expectations: Expectations | None = None
        self._sent: AxisTraffic = {}  # since the last record
        self._num_batches = self._num_steps = 0  # since the last record
        self._num_steps_before = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._takes_dry_run and trainer.is_global_zero:
            strategy = own_strategy(trainer, type(self).__name__)
            self._expectations = Expectations(pl_module, strategy, str(trainer.precision))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        expectations, self._expectations = self._expectations, None
        if expectations is not None and trainer.is_global_zero:
            self._note_dry_run(trainer, expectations, batch)
        if self._counters is None:
            self._counters = AxisCounters(own_strategy(trainer, type(self).__name__))
        self._counters.look()
        self._counters.since()  # what lies between two batches: validation, checkpoints

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is None or self._counters is None:  # Lightning leaves such a batch out
            return
        add_to(self._sent, self._counters.since())
        self._num_batches += 1
        steps = self._steps_taken(trainer)
        if steps < 1:  # gradients add up
            return
        self._num_steps += steps
        taken = self._num_steps_before + self._num_steps
        is_first = not self._num_steps_before  # in the first step ranks agree what to send
        if is_first or taken // self._every_n_steps > self._num_steps_before // self._every_n_steps:
            self._note_sent(trainer)

    @override
    def _end(self, trainer: Trainer, *, is_failed: bool) -> None:
        if not is_failed:
            self._note_sent(trainer)
        self._forget()

    def _note_sent(self, trainer: Trainer) -> None:
        steps = self._num_steps
        if not steps:
            return
        axes = {
            axis: {
                name: {
                    "calls": one.calls,
                    "bytes": one.bytes,
                    "seconds": one.seconds,
                    "waited": one.seconds_waited,
                }
                for name, one in operations.items()
            }
            for axis, operations in self._sent.items()
        }
        self._write(trainer, "traffic", steps=steps, batches=self._num_batches, axes=axes)
        sent = {
            f"sent_bytes/{axis}": sum(one.bytes for one in operations.values()) / steps
            for axis, operations in self._sent.items()
        }
        self._log_metrics(trainer, sent)
        self._num_steps_before += steps
        self._sent, self._num_batches, self._num_steps = {}, 0, 0

    def _note_dry_run(self, trainer: Trainer, expectations: Expectations, batch: Any) -> None:
        found = expectations.dry_run(batch)
        ranks = [] if found is None else _rows(found)
        besides = [] if found is None else list(found.not_counted)
        obstacle = expectations.obstacles.get("dry run")
        self._write(
            trainer,
            "dry_run",
            ranks=ranks,
            not_counted=besides,
            every_step=not isinstance(trainer.strategy, LocalUpdates),
            obstacle=obstacle,
        )


def _rows(found: DryRun) -> list[dict[str, Any]]:
    """Return what each rank of the pipeline holds and sends."""
    return [
        {
            "stages": list(one.stages),
            "memory": vars(one.memory),
            "sent": dict(one.sent),
            "idle_share": one.idle_share,
        }
        for one in found.ranks
    ]
