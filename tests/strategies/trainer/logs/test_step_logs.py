"""What users log in their steps is on every rank of a pipeline as on a single device."""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import Placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer import _lightning
from lightning_shard.strategies.trainer.logs.step_logs import MetricSources, StepLogs
from lightning_shard.strategies.trainer.step_collectives import MetricGroups
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.strategies.parity import ignoring
from tests.strategies.pipeline_parallel.pipelined import (
    PipelineOfRanks,
    Stage,
    pipelines,
    trainer_on,
)

pytestmark = ignoring("It is recommended to use `self.log")


class Logged(L.LightningModule):
    """Logs before its network and after it, by every reduction and by metric objects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stage()
        self.seen = SumMetric()
        self.mean = MeanMetric()
        self.val_mean = MeanMetric()
        self.several = MetricCollection({"max": MaxMetric(), "sum": SumMetric()})
        self.shown: list[dict[str, float]] = []
        self.ends: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.update(len(batch))
        self.log("early", 1.0)
        y = self.net(batch)
        self.log("loss", y.mean(), on_step=True, on_epoch=True, prog_bar=True)
        for name in ("sum", "max", "min"):
            self.log(f"by_{name}", getattr(y, name)(), on_epoch=True, reduce_fx=name)
        self.log("by_function", y.max(), on_step=False, on_epoch=True, reduce_fx=max)
        if batch_idx % 2:
            self.log_dict({"odd": float(batch_idx), "whole": float(len(y) * 0)}, prog_bar=True)
        self.mean(y, weight=1.0)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.several.update(y)
        return y.mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        shown = dict(self.trainer.progress_bar_metrics) | {"returned": outputs["loss"].item()}
        self.shown.append({name: float(value) for name, value in shown.items()})

    def on_train_epoch_end(self) -> None:
        self.ends.append((self.seen.compute().item(), self.mean.compute().item()))
        self.seen.reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self.net(batch)
        self.log("val_loss", y.mean() + self.current_epoch % 3)
        self.val_mean.update(y)
        self.log("val_mean", self.val_mean)
        return y

    def on_validation_epoch_end(self) -> None:
        self.log("val_twice", self.val_mean.compute() * 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics | {"step": step})


def fitted(strategy: Any, folder: Any, **options: Any) -> dict[str, Any]:
    """Train, and return everything that was shown, logged or decided on this rank."""
    model = Logged()
    loader: DataLoader[Tensor] = DataLoader(_dataset(torch.arange(23.0)), batch_size=5)
    stopping = EarlyStopping(monitor="val_loss", patience=2)
    saving = ModelCheckpoint(folder, monitor="val_mean", save_top_k=1, filename="{epoch}")
    logger = Rows()
    trainer = trainer_on(
        strategy,
        max_steps=10,
        max_epochs=5,
        callbacks=[stopping, saving],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        **options,
    )
    trainer.fit(model, loader, loader)
    return {
        "callback": _numbers(trainer.callback_metrics),
        "logged": _numbers(trainer.logged_metrics),
        "rows": logger.rows,
        "shown": model.shown,
        "ends": model.ends,
        "stopped": [stopping.stopped_epoch, trainer.current_epoch],
        "best": float(saving.best_model_score or 0),
    }


def _dataset(values: Tensor) -> Dataset[Tensor]:
    dataset: Any = values
    return dataset


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _approximately(expected: Any) -> Any:
    if isinstance(expected, dict):
        return {key: _approximately(value) for key, value in expected.items()}
    if isinstance(expected, list | tuple):
        return type(expected)(_approximately(value) for value in expected)
    return pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_every_rank_shows_logs_and_decides_what_a_single_device_does(
    tmp_path: Any, num_microbatches: int
) -> None:
    alone = fitted("auto", tmp_path / "alone")

    def train(rank: int) -> dict[str, Any]:
        pipeline, data = pipelines(rank, 3, 3)
        return fitted(PipelineOfRanks(pipeline, data, num_microbatches), tmp_path / str(rank))

    for found in run_ranks(train, 3):
        assert found is not None
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            assert found[name] == _approximately(expected), name
    assert alone["stopped"] == [2, 3]
    assert alone["ends"][0][0] == 23
    assert alone["rows"][0]["by_max_step"] == 9  # of the second batch: they are accumulated


def _recorded(
    calls: Callable[[L.LightningModule, int], None], sizes: tuple[int, ...] = (2, 1)
) -> list[list[Any]]:
    """Make two ranks log, the last one's counting, and return what reached `log` on each."""

    def on_rank(rank: int) -> list[Any]:
        module = _Recorder()
        reached = module.reached = []
        logs = StepLogs(module, all_ranks(), source=1)
        for index, size in enumerate(sizes):
            with logs.recording(size, counts=rank == 1):
                calls(module, index)
        assert reached == []
        assert "log" not in vars(module)
        logs.replay()
        logs.restore()
        return reached

    return [found or [] for found in run_ranks(on_rank, 2)]


class _Recorder(L.LightningModule):
    """A module that only says how it was asked to log."""

    reached: list[Any]

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.reached.append((name, value, args, kwargs))


def test_calls_are_replayed_in_order_with_their_options_and_the_full_batch_size() -> None:
    def calls(module: L.LightningModule, index: int) -> None:
        module.log("a", index * 3, True, on_epoch=True)
        module.log("b", torch.tensor(float(index)), batch_size=10 + index)
        module.log("a", 5.0, True, on_epoch=True)
        if index:
            module.log("once", 2.5)

    for reached in _recorded(calls):
        assert reached == [
            ("a", 1.0, (), {"prog_bar": True, "on_epoch": True, "batch_size": 3}),
            ("b", pytest.approx(11 / 21), (), {"batch_size": 21}),
            ("a", 5.0, (), {"prog_bar": True, "on_epoch": True, "batch_size": 3}),
            ("once", 2.5, (), {"batch_size": 1}),
        ]


def test_values_keep_the_type_that_lightning_would_log() -> None:
    def calls(module: L.LightningModule, index: int) -> None:
        module.log("int", 1)
        module.log("half", torch.tensor(0.5, dtype=torch.bfloat16))
        module.log("double", torch.tensor([[1 / 3]], dtype=torch.float64))
        module.log("count", torch.tensor(7), reduce_fx="SUM")

    for reached in _recorded(calls):
        values = {name: value for name, value, *_ in reached}
        assert values["int"].dtype is values["half"].dtype is torch.float32
        assert values["double"].dtype is torch.float64
        assert values["double"].item() == 1 / 3
        assert values["count"] == 14


def test_a_mean_over_no_samples_is_a_number() -> None:
    for reached in _recorded(lambda module, index: module.log("a", index, batch_size=0)):
        assert reached == [("a", 0.5, (), {"batch_size": 0})]


def test_a_metric_without_a_value_on_the_step_is_logged_for_the_epoch() -> None:
    def on_rank(rank: int) -> Any:
        module = _Recorder()
        module.reached, module.total = [], SumMetric()
        logs = StepLogs(module, all_ranks(), source=1)
        for value in (1.0, 2.0):
            with logs.recording(1, counts=rank == 1):
                module.total.update(value)
                module.log("total", module.total)
        logs.replay()
        ((_, metric, _, options),) = module.reached
        assert metric is module.total
        assert metric._forward_cache is None
        assert options == {"batch_size": 2}
        return metric.metric_state["sum_value"].item()

    assert run_ranks(on_rank, 2) == [0.0, 3.0]


def test_what_cannot_be_logged_is_refused_by_name() -> None:
    elsewhere = Placeholder.of(torch.zeros(()), (), "model.embedding.weight")
    refused: list[tuple[Any, str]] = [
        ({"value": torch.zeros(3)}, r"'x'.*shape \(3,\).*value.mean"),
        ({"value": "text"}, "'x'.*<class 'str'>"),
        ({"value": elsewhere}, "'x'.*model.embedding.weight"),
        ({"value": 1.0, "sync_dist_group": object()}, "'x', sync_dist_group"),
        ({"value": SumMetric()}, "'x'.*SumMetric that is not an attribute"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            _recorded(lambda module, index, given=options: module.log("x", **given))


def test_a_step_that_fails_gives_log_back_and_has_logged_nothing() -> None:
    def on_rank(rank: int) -> Any:
        module = _Recorder()
        module.reached = []
        logs = StepLogs(module, all_ranks(), source=0)
        with suppress(RuntimeError), logs.recording(1):
            module.log("lost", 1.0)
            raise RuntimeError
        assert "log" not in vars(module)
        return logs.replay({"loss": torch.tensor(2.0)} if rank == 0 else None), module.reached

    assert run_ranks(on_rank, 2) == [({"loss": 2.0}, [])] * 2


def test_a_batch_takes_one_small_broadcast_once_its_logs_are_known() -> None:
    def on_rank(rank: int) -> list[tuple[int, ...]]:
        module = _Recorder()
        module.reached = []
        pipeline = all_ranks()
        logs = StepLogs(module, pipeline, source=1)
        found = []
        for step in range(8):
            before = _messages(pipeline)
            for size in (2, 1):
                with logs.recording(size, counts=rank == 1):
                    module.log("a", float(step))
                    if step % 3 == 0:
                        module.log("b", float(step))
            assert logs.replay({"loss": torch.tensor(step / 2)})["loss"] == step / 2
            after = _messages(pipeline)
            found.append(tuple(now - then for now, then in zip(after, before, strict=True)))
        assert [value for name, value, *_ in module.reached if name == "b"] == [0, 3, 6]
        return found

    # loss, and value and size of two logs, after the number of the form
    for found in run_ranks(on_rank, 2):
        assert found is not None
        assert [(calls, objects) for calls, objects, _ in found[:2]] == [(1, 1), (1, 1)]
        assert found[2:] == [(1, 0, (1 + 5) * 8)] * 6


def _messages(pipeline: Collectives) -> tuple[int, int, int]:
    """Return the broadcasts so far, those of objects, and the bytes of the former."""
    tensors, objects = pipeline.traffic["broadcast"], pipeline.traffic["broadcast_object"]
    return tensors.calls, objects.calls, tensors.bytes


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
        sources = MetricSources(module, all_ranks(), source=1)
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
        sources = MetricSources(nn.ModuleList([metric]), all_ranks(), source=0)
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
    assert _lightning.computes_full(metric)
    assert not _lightning.is_persistent(metric)
    metric.persistent(True)
    assert _lightning.is_persistent(metric)
    _lightning.set_state(metric, {"value": [torch.tensor([1.0, 2.0])]}, update_count=2)
    assert metric.update_count == 2
    assert metric.compute().tolist() == [1.0, 2.0]
    assert not _lightning.computes_full(metric)
    _lightning.forget_computed(metric)
    assert _lightning.computes_full(metric)
    shown = metric(3.0)
    assert _lightning.step_value(metric) is shown
    _lightning.set_step_value(metric, None)
    assert _lightning.step_value(metric) is None
