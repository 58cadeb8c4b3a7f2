"""Logs the values that the last stage logs per microbatch once per batch, on every rank.

    microbatch     0            1            2
    last stage     log(loss)    log(loss)    log(loss)   ──> recorded, not logged
                         └───────── mean by size ──────────┘
    every rank                  log(loss, batch_size=all)    one broadcast of a few numbers

A metric of torchmetrics is updated inside the step, after the network, and so on the last stage
only; updates of other stages, on placeholders, must not count. Before it computes outside a step
each rank takes over the last stage's state, and then gathers over its data-parallel ranks.

Loggers get what a pipeline's steps have for them once per batch, too, as one step would. What hooks
on blocks give `self.log` comes the same way, since the last stage skips those blocks.

    stage 0       add_histogram(weight)  add_histogram(hidden)                    for each
    stage 1       add_histogram(weight)                         add_scalar(loss)  microbatch
    every rank    add_histogram(weight)  add_histogram(hidden)  add_scalar(loss)  once

A step runs once for each microbatch and stage, and no rank sees all of it. So its calls are kept,
not made. The last stage has them all, except for those in blocks of others, and placeholders where
another stage has the value. Samples of microbatches are joined, means are those of the batch.
"""

import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.torch_private import is_checkpointing, saving_hook
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import Microbatch, merge_outputs
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.pipeline_parallel.stage_run import running_stage
from lightning_shard.strategies.trainer import _lightning
from lightning_shard.strategies.trainer.logs.experiments import LoggerCall, in_full, taking
from lightning_shard.strategies.trainer.shared_values import Logged, SharedValues
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


_ADVICE = "Give loggers such values in on_train_batch_end(outputs, batch, batch_idx) instead"


class _Weight(NamedTuple):
    """Stands for a parameter of the module, which is read when the batch is done."""

    name: str


class _Elsewhere(NamedTuple):
    """Stands for a value that another stage has."""

    origin: str


class _StageCall(NamedTuple):
    """A call that one stage has made of one microbatch."""

    position: int
    logger: int
    path: tuple[Any, ...]
    values: dict[int | str, Any]

    @property
    def sign(self) -> str:
        """What calls that belong together have in common."""
        texts = {key: one for key, one in self.values.items() if isinstance(one, str)}
        held = [sorted(one) for one in self.values.values() if isinstance(one, Mapping)]
        return repr((self.position, self.logger, self.path, [*self.values], texts, held))


_Stage = tuple[int, int]  # and the microbatch


class LoggerCalls:
    """Keeps what the steps of a batch give loggers, and then gives it; each rank must call."""

    def __init__(
        self,
        module: pl.LightningModule,
        split: PipelineSplit,
        in_hook: Callable[[], AbstractContextManager[None]],
        logs: StepLogs,
    ) -> None:
        self._module, self._pipeline, self._in_hook = module, split.group, in_hook
        self._logs = logs
        self._names = {param: name for name, param in module.named_parameters()}
        self._shapes = {name: split.full_shape(param) for param, name in self._names.items()}
        self._kept: dict[_Stage, list[bytes]] = {}
        self._sizes: dict[int, int] = {}  # by microbatch
        self._running: Microbatch | None = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run the steps of a batch inside."""
        self._kept, self._sizes = {}, {}
        with taking(self._take), instead(self._module, "log", self._log_again):
            yield

    @contextmanager
    def step(self, microbatch: Microbatch) -> Iterator[None]:
        """Run the step of a microbatch on one stage inside; what it has kept before is dropped."""
        run = running_stage()
        if run is not None:
            self._kept.pop((run.stage, microbatch.index), None)
        self._sizes[microbatch.index] = microbatch.size
        with setting(self, _running=microbatch):
            yield

    def give(self) -> None:
        """Make the calls of the batch; each rank must call."""
        kept, self._kept = self._kept, {}
        has_any = torch.tensor([bool(kept)], dtype=torch.uint8, device=self._module.device)
        self._pipeline.all_reduce(has_any, "max").wait()
        if not has_any.item():
            return
        every: dict[_Stage, list[Any]] = {}
        for one in self._pipeline.all_gather_object(kept):
            every |= {stage: [*map(pickle.loads, calls)] for stage, calls in one.items()}
        logged: dict[int, list[list[LoggedCall]]] = {}
        for (stage, _), calls in sorted(every.items()):
            own = [one for one in calls if isinstance(one, LoggedCall)]
            logged.setdefault(stage, []).append(own)
        for microbatches in logged.values():
            self._logs.log_of_blocks(microbatches)
        with self._in_hook():
            for call in self._merged(dict(sorted(every.items(), reverse=True))):
                call.make()

    def keep(self, record: LoggedCall) -> None:
        """Keep what a block of this stage, which is not the last, gives `self.log`."""
        if not isinstance(record.value, Tensor):
            raise ConfigError(
                f"log({record.name!r}, metric) is called in a block of a pipeline's stage that is "
                f"not the last, as by a hook on the block, but metrics count on the last stage "
                f"alone; expected a number or a tensor there. Log the metric in the step."
            )
        self._keep(pickle.dumps(record._replace(value=record.value.cpu())))

    def _keep(self, encoded: bytes) -> None:
        run = running_stage()
        assert run is not None
        assert self._running is not None
        self._kept.setdefault((run.stage, self._running.index), []).append(encoded)

    def _log_again(self, *_: Any, **__: Any) -> None:
        """Log nothing outside of steps: what a checkpoint computes again was logged before."""
        self._refuse_in_backward("log")

    def _refuse_in_backward(self, name: str) -> None:
        is_again = is_checkpointing(saving_hook()) and self._running is None
        if self._running is None and running_stage() is None and not is_again:
            raise ConfigError(
                f"{name}() is called in the backward of a pipeline's microbatch, as by a hook on "
                f"an activation's gradient; expected calls in steps or in Lightning's hooks. "
                f"{_ADVICE}."
            )

    def _take(self, call: LoggerCall) -> None:
        name, run = call.path[-1], running_stage()
        self._refuse_in_backward(name)
        if run is None or run.stands_in or run.is_over:
            return
        if call.logger not in self._module.trainer.loggers:
            raise ConfigError(
                f"{name}() is called in a step of a pipeline, of a {type(call.logger).__name__} "
                f"that is none of the Trainer's loggers, expected one of Trainer(logger=[...]): a "
                f"step runs for each microbatch on several ranks. {_ADVICE}."
            )
        with run.unnoted():
            self._keep(self._encoded(call, run.position))

    def _encoded(self, call: LoggerCall, position: int) -> bytes:
        values: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
        values = apply_to_collection(values, Tensor, self._stand_in)
        number = self._module.trainer.loggers.index(call.logger)
        try:
            return pickle.dumps(_StageCall(position, number, call.path, values))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{call.path[-1]}() of a logger is called in a step of a pipeline with something "
                f"that cannot be sent to other ranks ({error}), expected tensors, numbers, texts "
                f"or objects that pickle takes. {_ADVICE}."
            ) from error

    @torch.no_grad()
    def _stand_in(self, tensor: Tensor) -> Any:
        if isinstance(tensor, Placeholder) and tensor.value is not None:
            tensor = tensor.value
        if isinstance(tensor, Placeholder):
            shape = self._shapes.get(tensor.origin)
            is_whole = tensor.is_parameter and tensor.shape == shape and tensor.like.is_contiguous()
            return _Weight(tensor.origin) if is_whole else _Elsewhere(tensor.origin)
        if isinstance(tensor, nn.Parameter) and tensor in self._names:
            return _Weight(self._names[tensor])
        return in_full(tensor).detach().to("cpu", copy=True).contiguous()

    def _merged(self, every: Mapping[_Stage, Sequence[Any]]) -> Iterator[LoggerCall]:
        """Yield one call for those of all stages and microbatches that belong together."""
        found: dict[tuple[str, int], dict[int, list[_StageCall]]] = {}
        order: dict[tuple[str, int], tuple[int, int]] = {}
        for (_, microbatch), calls in every.items():  # the last stage comes first
            times: dict[str, int] = {}
            for number, one in enumerate(calls):
                if not isinstance(one, _StageCall):
                    continue
                times[one.sign] = times.get(one.sign, 0) + 1
                key = one.sign, times[one.sign]
                order.setdefault(key, (one.position, number))
                found.setdefault(key, {}).setdefault(microbatch, []).append(one)
        for key in sorted(found, key=order.__getitem__):
            yield self._joined(dict(sorted(found[key].items())))

    def _joined(self, calls: Mapping[int, Sequence[_StageCall]]) -> LoggerCall:
        sizes = [self._sizes[microbatch] for microbatch in calls]
        first = next(iter(calls.values()))[0]
        known = [
            _known([one.values for one in stages], first.path[-1]) for stages in calls.values()
        ]
        values = {key: _merge([one[key] for one in known], sizes) for key in first.values}
        params = dict(self._module.named_parameters())
        values = apply_to_collection(values, _Weight, lambda one: params[one.name])
        args = tuple(one for key, one in values.items() if isinstance(key, int))
        kwargs = {key: one for key, one in values.items() if isinstance(key, str)}
        return LoggerCall(self._module.trainer.loggers[first.logger], first.path, args, kwargs)


def _known(values: Sequence[Any], name: str) -> Any:
    """Return what stages have of one value, from the first that has it."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _known([one[key] for one in values], name) for key in first}
    for value in values:
        missing: list[_Elsewhere] = []
        apply_to_collection(value, _Elsewhere, missing.append)
        if not missing:
            return value
    raise ConfigError(
        f"{name}() of a logger is given a value in a step of a pipeline that is computed from "
        f"{missing[0].origin!r}, and no stage has all of it; expected what one stage has. "
        f"{_ADVICE}."
    )


def _merge(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Merge what microbatches have of one value, as if of one step."""
    first = values[0]
    if isinstance(first, _Weight):
        return first
    if isinstance(first, Mapping):
        return {key: _merge([one[key] for one in values], sizes) for key in first}
    tensors = [one for one in values if isinstance(one, Tensor) and one.shape == first.shape]
    is_same = len(tensors) == len(values) and all(torch.equal(one, first) for one in tensors)
    return first if is_same else merge_outputs(list(values), list(sizes))
