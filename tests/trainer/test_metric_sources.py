"""Metrics that only a pipeline's last stage has updated compute the same on every rank."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import Placeholder
from lightning_shard.testing import run_ranks
from lightning_shard.trainer import _torchmetrics
from lightning_shard.trainer.metric_groups import MetricGroups
from lightning_shard.trainer.step_logs import MetricSources
from tests.strategies.pipeline_parallel.pipelined import pipelines


class Texts(Metric):
    """Keeps rows of integers in a list that is not reduced, as metrics of texts and boxes do."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, row: Tensor) -> None:
        self.rows.append(row)

    def compute(self) -> Tensor:
        return torch.cat(self.rows).sum(0)


def _metrics() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "accuracy": MulticlassAccuracy(3),
            "auroc": MulticlassAUROC(3),  # integer and two-dimensional lists
            "classwise": ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
            "group": MetricCollection([MulticlassPrecision(3), MulticlassAccuracy(3)]),
        }
    )


def _batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    scores = torch.rand(7, 3, generator=generator)
    return scores.softmax(-1), torch.arange(7) % 3


def _computed(metrics: nn.ModuleDict) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        found |= value if isinstance(value, dict) else {name: value}
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(3, 3), (2, 4)])
def test_every_rank_computes_what_one_device_does_over_all_batches(
    num_stages: int, num_ranks: int
) -> None:
    alone = _metrics()
    for index in range(4):
        for metric in alone.values():
            metric(*_batch(index))
    num_pipelines = num_ranks // num_stages

    def on_rank(rank: int) -> list[dict[str, Any]]:
        pipeline, data = pipelines(rank, num_stages, num_ranks)
        module = _metrics()
        groups = MetricGroups(module, data.group)
        sources = MetricSources(module, pipeline, num_stages - 1)
        found = []
        for _ in range(2):
            for index in range(rank // num_stages, 4, num_pipelines):
                with sources.step(counts=pipeline.rank == num_stages - 1):
                    for metric in module.values():
                        metric(*_batch(index))
            found += [_computed(module), _computed(module)]
            for metric in module.values():
                metric.reset()
        sources.restore()
        groups.restore()
        return found

    for found in run_ranks(on_rank, num_ranks):
        assert found is not None
        assert all(one == pytest.approx(_computed(alone)) for one in found)


def _of_two(run: Callable[[int, MetricSources, Any], Any], *metrics: Metric) -> list[Any]:
    """Run two stages with metrics named 0, 1 ..., and say what each has found."""

    def on_rank(rank: int) -> Any:
        module = nn.ModuleDict({str(i): one.clone() for i, one in enumerate(metrics)})
        sources = MetricSources(module, Collectives(dist.group.WORLD), source=1)
        return run(rank, sources, module)

    return run_ranks(on_rank, 2)


def _alone(rank: int, module: nn.Module) -> None:
    """Let the only data-parallel rank of a stage be itself."""
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    MetricGroups(module, group)


def test_lists_that_are_not_reduced_do_not_leave_ranks_waiting() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> list[int]:
        with sources.step(counts=rank == 1):
            for value in range(3):
                module["0"].update(torch.full((2, 2), value))
        _alone(rank, module)
        found: list[int] = module["0"].compute().tolist()
        return found

    assert _of_two(run, Texts()) == [[6, 6]] * 2


def test_updates_by_steps_of_other_stages_do_not_count() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> Any:
        _alone(rank, module)
        metric = module["0"]
        for counts in (False, rank == 1):
            with sources.step(counts=counts):
                metric.update(2.0)
                shown = metric(3.0)
                assert shown.item() == 3.0 if counts else shown.isnan()
                assert counts or metric.compute().isnan()
        metric.update(1.0)  # in a hook, on every rank
        return metric.compute().item(), metric.update_count

    assert _of_two(run, SumMetric()) == [(6.0, 3)] * 2


def test_updates_by_other_stages_of_the_only_rank_do_not_count() -> None:
    def on_rank(rank: int) -> float:
        metric = SumMetric()
        sources = MetricSources(nn.ModuleList([metric]), Collectives(dist.group.WORLD), source=0)
        for counts in (False, True):
            with sources.step(counts=counts):
                metric.update(2.0)
        return float(metric.compute())

    assert run_ranks(on_rank, 1) == [2.0]


def test_an_update_with_a_value_of_another_stage_is_refused() -> None:
    elsewhere = Placeholder.of(torch.zeros(()), (3,), "embedding.weight")

    def run(rank: int, sources: MetricSources, module: Any) -> None:
        with sources.step(counts=rank == 1):
            module["0"].update(elsewhere)
        module["0"].compute()

    with pytest.raises(ConfigError, match=r"Texts was updated .* from 'embedding.weight'"):
        _of_two(run, Texts())


def test_a_value_computed_before_is_not_kept_when_the_last_stage_went_on() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> list[float]:
        _alone(rank, module)
        found = []
        for value in (1.0, 2.0):
            with sources.step(counts=rank == 1):
                module["0"].update(value)
            found.append(module["0"].compute().item())
        if rank == 0:  # cached, as on a single device: no other rank is asked
            found.append(module["0"].compute().item())
        return found[-2:]

    assert _of_two(run, SumMetric()) == [[3.0, 3.0], [1.0, 3.0]]


def test_what_is_computed_in_a_step_is_over_the_data_parallel_ranks_of_the_stage() -> None:
    def on_rank(rank: int) -> float:
        pipeline, data = pipelines(rank, 2, 4)
        module = nn.ModuleDict({"sum": SumMetric(dist_sync_on_step=True)})
        MetricGroups(module, data.group)
        sources = MetricSources(module, pipeline, 1)
        with sources.step(counts=pipeline.rank == 1):
            shown = module["sum"](float(rank))
            shown += module["sum"].compute()
        return float(shown)

    found = run_ranks(on_rank, 4)
    assert [found[1], found[3]] == [8.0, 8.0]


def test_forward_in_a_hook_counts_on_every_rank_without_asking() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> float:
        _alone(rank, module)
        with sources.step(counts=rank == 1):
            module["0"].update(5.0)
        if rank == 1:  # would wait for rank 0
            assert module["0"](1.0) == 1.0
        return float(module["0"].compute())

    assert _of_two(run, MaxMetric()) == [5.0, 5.0]


def test_metrics_made_during_the_run_are_found() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> list[float]:
        module["tracker"] = MetricTracker(SumMetric(), maximize=True)
        found = []
        for value in (1.0, 2.0):
            module["tracker"].increment()
            sources.find()
            _alone(rank, module)
            with sources.step(counts=rank == 1):
                module["tracker"].update(value)
            found.append(module["tracker"].compute().item())
        return found

    assert _of_two(run) == [[1.0, 2.0]] * 2


def test_persistent_states_are_those_of_the_last_stage_in_every_state_dict() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> dict[str, Any]:
        module["0"].persistent(True)
        with sources.step(counts=rank == 1):
            module["0"].update(4.0)
            module["1"].update(4.0)
        sources.share_persistent()
        return {name: float(value) for name, value in module.state_dict().items()}

    assert _of_two(run, SumMetric(), SumMetric()) == [{"0.sum_value": 4.0}] * 2


def test_restored_metrics_and_copies_are_plain_ones() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> bool:
        metric, plain = module["0"], SumMetric()
        copies = [copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))]
        sources.restore()
        if rank == 0:
            for one in (metric, *copies):
                _alone(0, nn.ModuleList([one]))
                one.update(2.0)
                assert one.compute() == 2.0
        return vars(metric).keys() == vars(plain).keys()

    assert _of_two(run, SumMetric()) == [True, True]


def test_nothing_is_said_of_updates_on_other_stages_but_of_none_at_all() -> None:
    def run(rank: int, sources: MetricSources, module: Any) -> list[str]:
        _alone(rank, module)
        with sources.step(counts=rank == 1):
            module["0"].update(1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module["0"].compute()
            module["1"].compute()
        return [str(one.message)[:40] for one in caught]

    (first, _) = _of_two(run, SumMetric(), MeanMetric())
    assert first == ["The ``compute`` method of metric MeanMet"]


def test_the_private_names_are_torchmetrics_own() -> None:
    metric = CatMetric(compute_on_cpu=True)
    assert _torchmetrics.computes_full(metric)
    assert not _torchmetrics.is_persistent(metric)
    metric.persistent(True)
    assert _torchmetrics.is_persistent(metric)
    _torchmetrics.set_state(metric, {"value": [torch.tensor([1.0, 2.0])]}, update_count=2)
    assert metric.update_count == 2
    assert metric.compute().tolist() == [1.0, 2.0]
    assert not _torchmetrics.computes_full(metric)
    _torchmetrics.forget_computed(metric)
    assert _torchmetrics.computes_full(metric)
    shown = metric(3.0)
    assert _torchmetrics.step_value(metric) is shown
    _torchmetrics.set_step_value(metric, None)
    assert _torchmetrics.step_value(metric) is None
