"""Logs the values that the last stage logs per microbatch once per batch, on every rank.

    microbatch     0            1            2
    last stage     log(loss)    log(loss)    log(loss)   ──> recorded, not logged
                         └───────── mean by size ──────────┘
    every rank                  log(loss, batch_size=all)    one broadcast of a few numbers

A metric of torchmetrics is updated inside the step, after the network, and so on the last stage
only; updates of other stages, on placeholders, must not count. Before it computes outside a step
each rank takes over the last stage's state, and then gathers over its data-parallel ranks.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import nan
from numbers import Number
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import instead
from lightning_shard.core.placeholders import OtherStageError, Placeholder, is_placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.stage_run import running_stage
from lightning_shard.strategies.trainer import _lightning
from lightning_shard.strategies.trainer.exact_means import Logged
from lightning_shard.strategies.trainer.shared_values import SharedValues
from lightning_shard.strategies.trainer.step_attributes import StepAttributes, StepNote

_OPTIONS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]  # self, name, value
_REDUCTIONS = {"sum": torch.sum, "min": torch.min, "max": torch.max}  # all others: the mean


class _LoggedMetric(NamedTuple):
    """Stands for a metric, of which each rank has its own object."""

    attribute: str
    step_value: Tensor | None


class LoggedCall(NamedTuple):
    """One call of `log`."""

    name: str
    value: Tensor | _LoggedMetric
    batch_size: float
    options: dict[str, Any]
    parts: Sequence[Logged] = ()  # of which it is the mean, where that is to be exact


Logging = Callable[[Sequence[Logged]], AbstractContextManager[None]]


class StepLogs:
    """Records the `log` calls of a module's steps and replays them merged."""

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Collectives,
        source: int,
        logging: Logging | None = None,
    ) -> None:
        self._module, self._logging = module, logging
        self._shared = SharedValues(pipeline, source)
        self._metrics = MetricSources(module, pipeline, source)
        self._attributes = StepAttributes(module, buffers_of_first=logging is not None)
        self._names: dict[int, str] = {}
        self._microbatches: list[list[LoggedCall]] = []
        self._is_between_batches = True

    @contextmanager
    def recording(
        self,
        size: int,
        *,
        counts: bool = True,
        may_repeat: bool = False,
        completed: Callable[[Any], Any] = lambda value: value,
        in_block: Callable[[LoggedCall], None] = lambda record: None,
    ) -> Iterator[StepNote]:
        """Run a microbatch's step on a stage inside, where `module.log` only records."""
        if self._is_between_batches:
            self._is_between_batches = False
            self._metrics.find()
            self._attributes.find()
            self._names = {}
        records: list[LoggedCall] = []

        def record(_: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            options = dict(zip(_OPTIONS, args, strict=False)) | kwargs
            run = running_stage()
            if run is not None and run.stands_in:  # the block's own stage logs
                return
            if counts:
                records.append(self._record(name, value, size, options))
            elif run is not None and run.is_in_block:
                in_block(self._record(name, value, size, options))

        run = running_stage()
        with ExitStack() as stack:
            # What is called here is no part of the step, whose calls stages compare.
            with nullcontext() if run is None else run.unnoted():
                stack.enter_context(instead(self._module, "log", record))
                stack.enter_context(self._metrics.step(counts=counts, may_repeat=may_repeat))
                attributes = self._attributes.step(size, counts=counts, completed=completed)
                note = stack.enter_context(attributes)
            yield note
        if counts:
            self._microbatches.append(records)

    def replay(self, outputs: Any = None) -> Any:
        """Log the records since the last call, merged; each rank must call once per batch.

        Means are weighted by the samples (`log(batch_size=...)`, or the microbatch's). A metric's
        value on a step is the mean by size of its microbatches' values; over an epoch it is exact.

        Args:
            outputs: On the source, a further value to send to the other ranks, like the merged
                outputs of the step, which are returned on every rank.
        """
        merged = self._merged(self._microbatches)
        self._microbatches = []
        self._is_between_batches = True
        own = (outputs, merged, self._attributes.merged())
        outputs, records, changes = self._shared.share(own, self._module.device)
        self._attributes.put(changes)
        for record in records:
            self._log(record)
        return outputs

    def log_of_blocks(self, microbatches: Sequence[Sequence[LoggedCall]]) -> None:
        """Log what one stage's blocks have logged in each microbatch; each rank must call."""
        for record in self._merged(microbatches):
            self._log(record)

    def _merged(self, microbatches: Sequence[Sequence[LoggedCall]]) -> list[LoggedCall]:
        groups = _belonging_together(microbatches)
        merged = [*map(_merged_record, groups)]
        if self._logging is None:
            return merged
        pairs = zip(merged, groups, strict=True)
        return [one._replace(parts=[*map(_part, group)]) for one, group in pairs]

    def share_persistent_metrics(self) -> None:
        """Give every rank's metrics the states that a checkpoint saves; each rank must call."""
        self._metrics.share_persistent()

    def restore(self) -> None:
        """Give the module's metrics back as they were."""
        self._metrics.restore()

    def _record(self, name: str, value: Any, size: int, options: dict[str, Any]) -> LoggedCall:
        if options.get("sync_dist_group") is not None:
            raise ConfigError(
                f"log({name!r}, sync_dist_group=...) cannot be used with pipeline parallelism: the "
                f"value is logged on every stage, expected no group. Leave it out; sync_dist=True "
                f"reduces over the data-parallel ranks."
            )
        batch_size = options.pop("batch_size", None)
        return LoggedCall(
            name=name,
            value=self._held(name, value, options),
            batch_size=float(size if batch_size is None else batch_size),
            options=options,
        )

    def _held(self, name: str, value: Any, options: dict[str, Any]) -> Tensor | _LoggedMetric:
        if isinstance(value, Metric):
            step_value = _lightning.step_value(value)
            is_scalar = isinstance(step_value, Tensor) and step_value.numel() == 1
            return _LoggedMetric(
                attribute=self._attribute(name, value, options),
                step_value=_scalar(step_value, self._module.device) if is_scalar else None,
            )
        if is_placeholder(value):
            raise OtherStageError(
                f"log({name!r}, ...): got a value that is computed from {value.origin!r}, which "
                f"another stage of the pipeline holds; the last stage logs, expected what it has. "
                f"Log what is computed from the blocks or the batch alone.",
                value.origins,
            )
        is_tensor = isinstance(value, Tensor) and value.numel() == 1
        if not is_tensor and not isinstance(value, Number):
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ConfigError(
                f"log({name!r}, ...): got {got}, expected a number, a tensor of one element or a "
                f"torchmetrics.Metric. Log value.mean(), for example."
            )
        return _scalar(value, self._module.device)

    def _attribute(self, name: str, metric: Metric, options: dict[str, Any]) -> str:
        if id(metric) not in self._names:
            self._names = {
                id(part): path
                for path, part in self._module.named_modules()
                if isinstance(part, Metric)
            }
        attribute = self._names.get(id(metric), options.get("metric_attribute"))
        if attribute is None:
            raise ConfigError(
                f"log({name!r}, metric): got a {type(metric).__name__} that is not an attribute of "
                f"{type(self._module).__name__}, expected one of {sorted(self._names.values())}. "
                f"Make it an attribute of the module."
            )
        return str(attribute)

    def _log(self, record: LoggedCall) -> None:
        value: Any = record.value
        if isinstance(value, _LoggedMetric):
            metric = self._module.get_submodule(value.attribute)
            assert isinstance(metric, Metric)
            _lightning.set_step_value(metric, value.step_value)
            value = metric
        batch_size = int(record.batch_size)
        with nullcontext() if self._logging is None else self._logging(record.parts):
            self._module.log(record.name, value, batch_size=batch_size, **record.options)


def _scalar(value: Any, device: torch.device) -> Tensor:
    """Return a scalar that Lightning logs unchanged: of the default type or a wider one."""
    scalar = torch.as_tensor(value).detach().reshape(())
    dtype = torch.promote_types(scalar.dtype, torch.get_default_dtype())
    return scalar.to(device, dtype, copy=True)


def _belonging_together(microbatches: Sequence[Sequence[LoggedCall]]) -> list[list[LoggedCall]]:
    """Return the n-th calls of each microbatch with one name and the same options, as one."""
    groups: defaultdict[Any, list[LoggedCall]] = defaultdict(list)
    for records in microbatches:
        calls: defaultdict[Any, int] = defaultdict(int)
        for record in records:
            kind = record.value.attribute if isinstance(record.value, _LoggedMetric) else None
            key = (record.name, kind, repr(record.options))
            groups[key, calls[key]].append(record)
            calls[key] += 1
    return [*groups.values()]


def _part(record: LoggedCall) -> Logged:
    value = record.value if isinstance(record.value, Tensor) else nan
    return float(value), record.batch_size


def _merged_record(records: Sequence[LoggedCall]) -> LoggedCall:
    first = records[0]
    sizes = [record.batch_size for record in records]
    values = [record.value for record in records]
    value: Tensor | _LoggedMetric
    if isinstance(first.value, _LoggedMetric):
        shown = [value.step_value for value in values if isinstance(value, _LoggedMetric)]
        known = [value for value in shown if value is not None]
        mean = _mean(known, sizes) if len(known) == len(records) else None
        value = first.value._replace(step_value=mean)
    else:
        value = _reduced([value for value in values if isinstance(value, Tensor)], sizes, first)
    return first._replace(value=value, batch_size=sum(sizes))


def _reduced(values: Sequence[Tensor], sizes: Sequence[float], first: LoggedCall) -> Tensor:
    reduce_fx = first.options.get("reduce_fx", "mean")
    if isinstance(reduce_fx, str):
        reduce_fx = _REDUCTIONS.get(reduce_fx.lower(), torch.mean)
    if reduce_fx is torch.mean:
        return _mean(values, sizes)
    return torch.as_tensor(reduce_fx(torch.stack(list(values))))


def _mean(values: Sequence[Tensor], sizes: Sequence[float]) -> Tensor:
    """Return the mean weighted by size, added up in float64; unweighted for sizes of zero."""
    stacked = torch.stack(list(values))
    weights = torch.tensor(sizes, dtype=torch.float64, device=stacked.device)
    if sum(sizes) == 0:
        weights.fill_(1)
    return ((stacked * weights).sum() / weights.sum()).to(stacked.dtype)


class MetricSources:
    """Lets the metrics in a module compute from one rank's state, in one order, until `restore`."""

    def __init__(self, module: nn.Module, pipeline: Collectives, source: int) -> None:
        self._module = module
        self._pipeline = pipeline
        self._source = source
        self._in_step = False
        self._parts: list[Metric | MetricCollection] = []
        self._computes: list[tuple[Metric, Callable[..., Any]]] = []
        self.find()

    @contextmanager
    def step(self, *, counts: bool, may_repeat: bool = False) -> Iterator[None]:
        """Run the step of one microbatch on one stage inside; only the last stage's counts.

        A metric that computes inside does so over the data-parallel ranks of this stage alone.
        Earlier results are forgotten on every rank alike, so that all ask the source again when one
        does. A step that `may_repeat` after it has raised has its updates taken back.
        """
        self._in_step = True
        before = [
            (one, _lightning.copied_state(one), one.update_count)
            for one in (self._metrics() if counts and may_repeat else ())
        ]
        try:
            with ExitStack() as stack:
                if not counts:
                    self._silence(stack)
                yield
        except BaseException:
            for metric, state, count in before:
                _lightning.set_state(metric, state, count)
            raise
        finally:
            self._in_step = False
            for metric in self._metrics():
                _lightning.forget_computed(metric)

    def share_persistent(self) -> None:
        """Take over the states that are saved in checkpoints; each rank must call."""
        for metric in self._metrics():
            if _lightning.is_persistent(metric):
                self._take_over(metric)

    def restore(self) -> None:
        """Give the metrics back as they were."""
        for metric, compute in self._computes:
            vars(metric)["compute"] = compute
        self._parts, self._computes = [], []

    def find(self) -> None:
        """Find metrics that have been made since the last call."""
        self._parts = [
            part for part in self._module.modules() if isinstance(part, Metric | MetricCollection)
        ]
        if self._pipeline.size == 1:
            return
        known = {id(metric) for metric, _ in self._computes}  # metrics compare by their states
        for metric in self._metrics():
            if id(metric) not in known:
                self._computes.append((metric, metric.compute))
                vars(metric)["compute"] = self._computing(metric, metric.compute)

    def _metrics(self) -> list[Metric]:
        return [part for part in self._parts if isinstance(part, Metric)]

    def _computing(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_everywhere(*args: Any, **kwargs: Any) -> Any:
            if not self._in_step and _lightning.computes_full(metric):
                self._take_over(metric)
            return compute(*args, **kwargs)

        return compute_everywhere

    def _take_over(self, metric: Metric) -> None:
        is_source = self._pipeline.rank == self._source
        own = (_state_of(metric), metric.update_count) if is_source else None
        received = self._pipeline.broadcast_object(own, self._source)
        if not is_source:
            assert received is not None
            _lightning.set_state(metric, *received)

    def _silence(self, stack: ExitStack) -> None:
        for part in self._parts:
            stack.enter_context(instead(part, "update", _nothing))
            stack.enter_context(instead(part, "forward", _no_value(part)))
            stack.enter_context(instead(part, "compute", _no_value(part)))


def _state_of(metric: Metric) -> Any:
    """Return a state on the CPU, to pickle: else another rank would use the source's GPU."""

    def on_cpu(state: Tensor) -> Tensor:
        if isinstance(state, Placeholder):
            raise ConfigError(
                f"{type(metric).__name__} was updated with a value that is computed from "
                f"{state.origin!r}, which another stage of the pipeline holds, expected what the "
                f"last stage has. Update it with what is computed from the blocks or the batch."
            )
        return state.detach().cpu()

    return apply_to_collection(metric.metric_state, Tensor, on_cpu)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a metric's update."""


def _no_value(part: Metric | MetricCollection) -> Callable[..., Any]:
    """Return a function that returns NaN, for each metric of a collection."""

    def value(*_: Any, **__: Any) -> Any:
        if isinstance(part, Metric):
            return torch.tensor(torch.nan, device=part.device)
        return {name: metric.compute() for name, metric in part.items(copy_state=False)}

    return value
