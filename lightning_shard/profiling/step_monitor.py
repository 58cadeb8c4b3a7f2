"""Writes each step's loss and time, and who takes part: the callback `StepMonitor`.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.core.options import checked_options
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import batch_size_of
from lightning_shard.planning.machine import MachineProfile, machine_profile
from lightning_shard.profiling.run_monitor import RunMonitor, own_strategy
from lightning_shard.profiling.traffic_monitor import (
    AxisCounters,
    AxisTraffic,
    Expectations,
    add_to,
    seconds_in,
    waited,
)
from lightning_shard.strategies.elastic import ElasticStrategy

_RATES = {"samples": "samples_per_second", "tokens": "tokens_per_second"}
_IDS = "input_ids"  # of Hugging Face's batches


@dataclass(kw_only=True)
class StepTime:
    """Seconds of one optimizer step of this rank; see the module's first lines.

    `num_batches` has the batches whose gradients have added up.
    """

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


class StepMonitor(RunMonitor):
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

    def _forget(self) -> None:
        self._clock: StepClock | None = None
        self._counters: AxisCounters | None = None
        self._expectations: Expectations | None = None
        self._handles: dict[Optimizer, RemovableHandle] = {}
        self._contents: dict[str, int | None] = {"samples": 0, "tokens": 0}  # of this step so far
        self._losses: list[Tensor] = []
        self._unwritten: dict[str, Any] | None = None  # the record of the last step
        self._flops_per: dict[str, float] = {}  # by what the batch holds
        self._generation: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.is_global_zero:
            strategy = own_strategy(trainer, type(self).__name__)
            self._expectations = Expectations(pl_module, strategy, str(trainer.precision))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._note_generation(trainer)
        expectations, self._expectations = self._expectations, None
        if expectations is not None and trainer.is_global_zero:
            self._note_flops(trainer, expectations, batch)
        if self._clock is None or self._counters is None:
            self._counters = AxisCounters(own_strategy(trainer, type(self).__name__))
            self._clock = StepClock(self._counters.since)
        self._counters.look()
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
        data = own_strategy(trainer, type(self).__name__).data_collectives
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
            **self._contents,
        }

    def _write_last(self, trainer: Trainer) -> None:
        record, self._unwritten = self._unwritten, None
        if record is not None:
            self._write(trainer, "step", **{**record, "loss": _mean(record["loss"])})

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
        strategy = own_strategy(trainer, type(self).__name__)
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

    def _note_flops(self, trainer: Trainer, expectations: Expectations, batch: Any) -> None:
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
            self._generation, self._clock = now.number, None
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
