"""Writes each step's loss, time and traffic, and who takes part: `StepMonitor`, `TrafficMonitor`.

The clock of the rank's host says where the time of a step goes:

    batch end ──loading──> batch start ──forward, backward──> update ──> batch end
                                │   waits for peers, by axis   │
                                └── sending: starting, copying, local sums ──┘

    seconds     from the end of one optimizer step to the end of the next, without validation
    loading     between two batches: the loader, and callbacks after a batch
    waiting     of this, by axis of the mesh, for data of peers
    sending     in collectives besides: starting them, copies, local sums
    optimizer   clipping and the update itself
    compute     what is left: forward and backward, and hooks

On CUDA the host does not wait for the device: waiting within NCCL, which happens in the device's
streams, counts as compute there.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import OperationTraffic, Traffic
from lightning_shard.checkpoint.random_state import load_random_state, random_state
from lightning_shard.core._lightning import runners_of
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.core.options import AtLeastOne, checked_options
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import batch_size_of
from lightning_shard.planning.dry_run import flops_of_batch
from lightning_shard.planning.machine import MachineProfile, machine_profile
from lightning_shard.planning.report import DryRun
from lightning_shard.planning.simulated_model import NoElements
from lightning_shard.precision.plugins import ShardedPrecision
from lightning_shard.profiling.run_monitor import RunMonitor, own_strategy
from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.elastic import ElasticStrategy

T = TypeVar("T")

# What a run is expected to take, found on a copy of its module without elements.
#
#     setup           the module is full: rank 0 copies its shapes
#     first batch     its shapes are known: the copy takes a step, see `planning`
#
# A copy takes no memory and no arithmetic, and other ranks are not asked.


class Expectations:
    """What one rank finds out about a run before its first step, or why it cannot."""

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
        strategy = self._strategy
        return self._found(
            "dry run",
            lambda: strategy.dry_run(
                self._module,
                _shapes(batch),
                world_size=strategy.mesh_size,
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


class _CountingMonitor(RunMonitor):
    """Counts traffic by axis; rank 0 notes beside it what was expected of the first batch."""

    _expects = True

    def _forget(self) -> None:
        self._counters: AxisCounters | None = None
        self._expectations: Expectations | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._expects and trainer.is_global_zero:
            strategy = own_strategy(trainer, self)
            self._expectations = Expectations(pl_module, strategy, str(trainer.precision))

    def _counting(self, trainer: Trainer, batch: Any) -> AxisCounters:
        """Return the counters of the groups that there are as a batch begins."""
        expectations, self._expectations = self._expectations, None
        if expectations is not None and trainer.is_global_zero:
            self._note(trainer, expectations, batch)
        if self._counters is None:
            self._counters = AxisCounters(own_strategy(trainer, self))
        self._counters.look()
        return self._counters

    @abstractmethod
    def _note(self, trainer: Trainer, expectations: Expectations, batch: Any) -> None:
        """Write what is expected of a batch."""


class TrafficMonitor(_CountingMonitor):
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
        self._every_n_steps, self._expects = every_n_steps, dry_run
        self._forget()

    @override
    def _forget(self) -> None:
        super()._forget()
        self._sent: AxisTraffic = {}  # since the last record
        self._num_batches = self._num_steps = 0  # since the last record
        self._num_steps_before = 0

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._counting(
            trainer, batch
        ).since()  # what lies between two batches: validation, checkpoints

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

    @override
    def _note(self, trainer: Trainer, expectations: Expectations, batch: Any) -> None:
        found = expectations.dry_run(batch)
        ranks = [] if found is None else _rows(found)
        besides = [] if found is None else list(found.not_counted)
        obstacle = expectations.obstacles.get("dry run")
        self._write(
            trainer,
            "dry_run",
            ranks=ranks,
            not_counted=besides,
            every_step=own_strategy(trainer, self).meets_at_steps,
            obstacle=obstacle,
        )


def _rows(found: DryRun) -> list[dict[str, Any]]:
    return [
        {
            "stages": list(one.stages),
            "memory": vars(one.memory),
            "sent": dict(one.sent),
            "idle_share": one.idle_share,
        }
        for one in found.ranks
    ]


_RATES = {"samples": "samples_per_second", "tokens": "tokens_per_second"}
_IDS = "input_ids"  # of Hugging Face's batches


@dataclass(kw_only=True)
class StepTime:
    """Seconds of one optimizer step of this rank, and of how many batches; see the first lines."""

    seconds: float = 0.0
    loading: float = 0.0
    optimizer: float = 0.0
    traffic: AxisTraffic = field(default_factory=dict)
    num_batches: int = 0

    @property
    def waiting(self) -> dict[str, float]:
        """Seconds of waiting for peers, by axis."""
        return waited(self.traffic)

    @property
    def sending(self) -> float:
        """Seconds in collectives in which the rank did not wait for peers."""
        return seconds_in(self.traffic) - sum(self.waiting.values())

    @property
    def compute(self) -> float:
        """Seconds that are left for forward and backward."""
        known = self.loading + self.optimizer + seconds_in(self.traffic)
        return max(self.seconds - known, 0.0)


class StepClock:
    """Takes the time of steps; `traffic_since` returns the counters since it was called before."""

    def __init__(
        self, traffic_since: Callable[[], AxisTraffic], now: Callable[[], float] = perf_counter
    ) -> None:
        self._since, self._now = traffic_since, now
        self._step = StepTime()
        self._mark = now()
        self._update_began: float | None = None

    def pause(self) -> None:
        """Begin what is no part of a step: validation, say."""
        self._add_seconds(is_loading=True)
        self._count()

    def go_on(self) -> None:
        """End what is no part of a step."""
        self._mark = self._now()
        self._since()

    def begin_batch(self) -> None:
        """Note that a batch is there; a pause ends."""
        self._add_seconds(is_loading=True)
        talking = seconds_in(self._count())
        self._step.loading = max(self._step.loading - talking, 0.0)

    def begin_update(self) -> None:
        """Note that gradients are complete."""
        self._count()
        self._update_began = self._now()

    def end_update(self) -> None:
        """Note that an optimizer has updated the parameters."""
        if self._update_began is not None:
            talking = seconds_in(self._count())
            own = self._now() - self._update_began - talking
            self._step.optimizer += max(own, 0.0)
        self._update_began = None

    def end_batch(self) -> None:
        """Note that a batch is done."""
        self._add_seconds()
        self._count()
        self._step.num_batches += 1

    def take(self) -> StepTime:
        """Return the step that ends here, and begin the next."""
        step, self._step = self._step, StepTime()
        return step

    def _add_seconds(self, *, is_loading: bool = False) -> None:
        now = self._now()
        seconds, self._mark = now - self._mark, now
        self._step.seconds += seconds
        self._step.loading += seconds if is_loading else 0.0

    def _count(self) -> AxisTraffic:
        more = self._since()
        add_to(self._step.traffic, more)
        return more


class StepMonitor(_CountingMonitor):
    """Write every step's loss, time, samples and tokens, of every rank, into the run's folder.

    A step's time is split into computing, waiting for peers by axis of the mesh, the optimizer,
    and loading. Loggers get rank 0's as `monitor/...`, with tokens a second and MFU.

    A record is written when the next step has ended, so that the host does not wait for the device.

    Args:
        folder: Folder of the run; None takes the first logger's, or the Trainer's
            `default_root_dir` without loggers.
        machine: Name or file of a machine profile, such as "h100": MFU is told against its peak in
            the run's precision. None tells the rate of operations alone.
        tokens: Counts the tokens of a rank's batch; None takes the elements of `input_ids`, or of
            the first two-dimensional tensor of whole numbers.

    Raises:
        ConfigError: No such machine profile; at set-up, another package's strategy, or an elastic
            one without a folder.
    """

    @checked_options
    def __init__(
        self,
        folder: str | Path | None = None,
        machine: str | Path | None = None,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__(folder)
        self._machine: MachineProfile | None = None if machine is None else machine_profile(machine)
        self._tokens = tokens
        self._forget()

    @override
    def _forget(self) -> None:
        super()._forget()
        self._clock: StepClock | None = None
        self._handles: dict[Optimizer, RemovableHandle] = {}
        self._contents: dict[str, int | None] = {"samples": 0, "tokens": 0}  # of this step so far
        self._losses: list[Tensor] = []
        self._learning_rate: float | None = None  # of the first group
        self._unwritten: dict[str, Any] | None = None  # the record of the last step
        self._flops_per: dict[str, float] = {}  # by what the batch holds
        self._generation: int | None = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._note_generation(trainer)
        counters = self._counting(trainer, batch)
        if self._clock is None:
            self._clock = StepClock(counters.since)
        self._clock.begin_batch()
        for name, more in (
            ("samples", num_samples(batch)),
            ("tokens", num_tokens(batch, self._tokens)),
        ):
            before = self._contents[name]
            self._contents[name] = None if more is None or before is None else before + more

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._clock is None:
            return
        self._clock.begin_update()
        self._learning_rate = float(optimizer.param_groups[0]["lr"])
        if optimizer not in self._handles:
            self._handles[optimizer] = optimizer.register_step_post_hook(self._end_update)

    def _end_update(self, *_: Any) -> None:
        if self._clock is not None:
            self._clock.end_update()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is None or self._clock is None:  # Lightning leaves such a batch out
            return
        self._clock.end_batch()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone())
        if not self._steps_taken(trainer):  # gradients add up
            return
        step = self._clock.take()
        self._write_last(trainer)
        self._unwritten = self._record(trainer, step)
        self._log(trainer, step)
        self._contents, self._losses = {"samples": 0, "tokens": 0}, []

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._clock.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self._clock is None:
            return
        self._clock.go_on()
        if trainer.is_global_zero:
            values = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if value.numel() == 1
            }
            self._write(trainer, "metrics", values=values)

    @override
    def _end(self, trainer: Trainer, *, is_failed: bool) -> None:
        self._write_last(trainer)
        for handle in self._handles.values():
            handle.remove()
        self._forget()

    def _record(self, trainer: Trainer, step: StepTime) -> dict[str, Any]:
        strategy = own_strategy(trainer, self)
        data, plugin = strategy.data_collectives, strategy.precision_plugin
        norm = plugin.grad_norm if isinstance(plugin, ShardedPrecision) else None
        return {
            "step": trainer.global_step,
            "seconds": step.seconds,
            "loading": step.loading,
            "compute": step.compute,
            "optimizer": step.optimizer,
            "sending": step.sending,
            "waiting": step.waiting,
            "num_batches": step.num_batches,
            "data_rank": data.rank,
            "data_size": data.size,
            "loss": self._losses,
            "learning_rate": self._learning_rate,
            "grad_norm": [] if norm is None else [norm],
            **self._contents,
        }

    def _write_last(self, trainer: Trainer) -> None:
        record, self._unwritten = self._unwritten, None
        if record is not None:
            means = {name: _mean(record[name]) for name in ("loss", "grad_norm")}
            self._write(trainer, "step", **record | means)

    def _log(self, trainer: Trainer, step: StepTime) -> None:
        """Give loggers what Lightning's own would not know of, as rank 0 sees it."""
        every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not trainer.is_global_zero or trainer.global_step % every_n_steps:
            return
        metrics = {
            "step_seconds": step.seconds,
            "compute_seconds": step.compute,
            "optimizer_seconds": step.optimizer,
            "loading_seconds": step.loading,
            "sending_seconds": step.sending,
            **{f"waiting_seconds/{axis}": one for axis, one in step.waiting.items()},
            **self._rates(trainer, step),
        }
        self._log_metrics(trainer, metrics)

    def _rates(self, trainer: Trainer, step: StepTime) -> dict[str, float]:
        """Return what all ranks do in a second, if their batches are as large as rank 0's."""
        strategy = own_strategy(trainer, self)
        in_a_second = {
            name: strategy.data_collectives.size * number / step.seconds
            for name, number in self._contents.items()
            if number
        }
        found = {_RATES[name]: number for name, number in in_a_second.items()}
        for name, flops in self._flops_per.items():
            of_rank = flops * in_a_second.get(name, 0.0) / strategy.mesh_size
            found["flops_per_second_and_rank"] = of_rank
            if self._machine is not None:
                found["mfu"] = of_rank / self._machine.flops(str(trainer.precision))
        return found

    @override
    def _note(self, trainer: Trainer, expectations: Expectations, batch: Any) -> None:
        """Write how much arithmetic a token, or a sample, takes."""
        flops, machine = expectations.flops(batch), self._machine
        held = {"tokens": num_tokens(batch, self._tokens), "samples": num_samples(batch)}
        per = next(((name, number) for name, number in held.items() if number), None)
        if flops is not None and per is not None:
            self._flops_per = {per[0]: flops / per[1]}
        self._write(
            trainer,
            "flops",
            per=self._flops_per,
            machine=None if machine is None else machine.name,
            peak=None if machine is None else machine.flops(str(trainer.precision)),
            obstacle=expectations.obstacles.get("flops"),
        )

    def _note_generation(self, trainer: Trainer) -> None:
        """Write who takes part in an elastic fit, whenever it is others than before."""
        strategy = trainer.strategy
        if not isinstance(strategy, ElasticStrategy):
            return
        now = strategy.generation
        if now.number != self._generation:
            self._write_last(trainer)  # before, since ranks may have gone back behind it
            self._generation, self._clock, self._counters = now.number, None, None
            self._contents, self._losses = {"samples": 0, "tokens": 0}, []
            members, reason = list(now.members), now.reason
            self._write(trainer, "generation", number=now.number, members=members, reason=reason)


def _mean(losses: list[Tensor]) -> float | None:
    """Return the mean of the losses of a step's batches; None where they cannot be read."""
    try:
        return float(torch.stack([loss.float() for loss in losses]).mean()) if losses else None
    except RuntimeError:  # of a device that has failed
        return None


def num_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch; None where it cannot be told."""
    try:
        return batch_size_of(batch)
    except ConfigError:
        return None


def num_tokens(batch: Any, count: Callable[[Any], int] | None = None) -> int | None:
    """Return the number of tokens in a batch; None where it has none."""
    if count is not None:
        return int(count(batch))
    if isinstance(batch, Mapping) and isinstance(batch.get(_IDS), Tensor):
        return int(batch[_IDS].numel())
    ids = (one for one in _tensors(batch) if one.ndim == 2 and _is_whole(one))
    return next((one.numel() for one in ids), None)


def _is_whole(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _tensors(value)
