"""Gives loggers what a pipeline's steps have for them, once per batch, as one step would.

What hooks on blocks give `self.log` comes the same way, since the last stage skips those blocks.

    stage 0       add_histogram(weight)  add_histogram(hidden)                    for each
    stage 1       add_histogram(weight)                         add_scalar(loss)  microbatch
    every rank    add_histogram(weight)  add_histogram(hidden)  add_scalar(loss)  once

A step runs once for each microbatch and stage, and no rank sees all of it. So its calls are kept,
not made. The last stage has them all, except for those in blocks of others, and placeholders where
another stage has the value. Samples of microbatches are joined, means are those of the batch.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_shard.core.extensions import instead
from lightning_shard.core.placeholders import Placeholder
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.torch_private import is_checkpointing, saving_hook
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import Microbatch, merge_outputs
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.pipeline_parallel.stage_run import running_stage
from lightning_shard.strategies.trainer.logs.experiments import LoggerCall, in_full, taking
from lightning_shard.strategies.trainer.logs.step_logs import LoggedCall, StepLogs

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
