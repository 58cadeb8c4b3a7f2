"""What users log in their steps is on every rank of a pipeline as on a single device."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import Placeholder
from lightning_shard.testing import run_ranks
from lightning_shard.trainer.step_logs import StepLogs
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.pipeline_parallel.pipelined import (
    PipelineOfRanks,
    Stage,
    pipelines,
    trainer_on,
)

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
]


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
        logs = StepLogs(module, Collectives(dist.group.WORLD), source=1)
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
        logs = StepLogs(module, Collectives(dist.group.WORLD), source=1)
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
        logs = StepLogs(module, Collectives(dist.group.WORLD), source=0)
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
        pipeline = Collectives(dist.group.WORLD)
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
