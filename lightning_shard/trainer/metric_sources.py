"""Lets torchmetrics on every rank of a pipeline compute from the state of its last stage.

A metric is updated inside the step, after the network, and so on the last stage only. Before a
metric computes outside a step, each rank takes over the state of the pipeline's last stage, and
then goes on as it would have alone: it gathers over its data-parallel ranks, which have done the
same.

    inside a step     last stage: counts          other stages: update, forward do nothing
    outside           last stage: state ──> other stages;  then compute, on every rank

Steps of other stages must not count: a rank may hold the last stage and others, whose results may
be placeholders.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import Placeholder
from lightning_shard.trainer import _torchmetrics


class MetricSources:
    """Lets the metrics in a module compute from one rank's state until `restore`.

    Args:
        module: Module with the metrics. Metrics that are not submodules cannot be found.
        pipeline: Group of the ranks of this rank's pipeline, each of which must compute the same
            metrics in the same order, as the ranks of any group must.
        source: Rank in `pipeline` of the last stage.
    """

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
        """Run the step of one microbatch on one stage inside.

        A metric that computes inside does so over the data-parallel ranks of this stage alone.
        Earlier results are forgotten, on every rank alike, so that all of them ask the source
        again when one does.

        Args:
            counts: Whether the step is the last stage's, which alone changes the metrics.
            may_repeat: Whether a step that raises is run again: its updates are taken back.
        """
        self._in_step = True
        before = [
            (one, _torchmetrics.copied_state(one), one.update_count)
            for one in (self._metrics() if counts and may_repeat else ())
        ]
        try:
            with ExitStack() as stack:
                if not counts:
                    self._silence(stack)
                yield
        except BaseException:
            for metric, state, count in before:
                _torchmetrics.set_state(metric, state, count)
            raise
        finally:
            self._in_step = False
            for metric in self._metrics():
                _torchmetrics.forget_computed(metric)

    def share_persistent(self) -> None:
        """Take over the states that are saved in checkpoints; each rank must call."""
        for metric in self._metrics():
            if _torchmetrics.is_persistent(metric):
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
            if not self._in_step and _torchmetrics.computes_full(metric):
                self._take_over(metric)
            return compute(*args, **kwargs)

        return compute_everywhere

    def _take_over(self, metric: Metric) -> None:
        is_source = self._pipeline.rank == self._source
        own = (_state_of(metric), metric.update_count) if is_source else None
        received = self._pipeline.broadcast_object(own, self._source)
        if not is_source:
            assert received is not None
            _torchmetrics.set_state(metric, *received)

    def _silence(self, stack: ExitStack) -> None:
        for part in self._parts:
            stack.enter_context(patch.object(part, "update", _nothing))
            stack.enter_context(patch.object(part, "forward", _no_value(part)))
            stack.enter_context(patch.object(part, "compute", _no_value(part)))


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
