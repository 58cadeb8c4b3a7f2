"""What hooks give a logger's experiment: Lightning has one on rank 0, and dummies elsewhere."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer.logs.experiments import shared_loggers
from tests.trainers import cpu_trainer

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated",
    "ignore:The 'train_dataloader' does not have many workers",
)
SCHEMES = ("zero1", "zero2", "zero3", "tensor_parallel", "pipeline_parallel")


class Experiment:
    """Reads what it is given, more than once and by the memory, as writers of histograms do."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __getitem__(self, _: int) -> "Experiment":
        return self

    def watch(self, model: nn.Module, *, log: str) -> None:
        """Show gradients and weights by hooks, as wandb's does, on the rank that has this."""
        if log == "parameters":
            model.register_forward_hook(partial(self._note, model, "data"))
            return
        for name, param in model.named_parameters():
            param.register_hook(lambda grad, name=name: self.add_histogram(name, grad, 0))  # type: ignore[no-untyped-call]

    def _note(self, model: nn.Module, what: str, *_: object) -> None:
        for name, param in model.named_parameters():
            self.add_histogram(f"{what} {name}", param.data, 0)

    def add_histogram(self, name: str, values: Tensor, step: int) -> None:
        numbers = values.detach().cpu().numpy()
        self.seen[f"{name} {step}"] = numbers.copy(), values.detach().square().sum().item()


class Histograms(Logger):
    name, version = "histograms", 0

    def __init__(self) -> None:
        super().__init__()
        self._experiment = Experiment()

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        return self._experiment

    @rank_zero_only
    def log_histogram(self, name: str, values: Tensor, step: int) -> None:
        self.experiment.add_histogram(f"own {name}", values, step)

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Told(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
            for _ in range(2)
        ]
        self.net = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, param in self.named_parameters():
            self.logger.experiment.add_histogram(f"grad {name}", param.grad, self.global_step)

    def on_train_epoch_end(self) -> None:
        for name, param in self.named_parameters():
            self.logger.experiment.add_histogram(name, param, step=self.current_epoch)
            self.logger.experiment[0].add_histogram(f"data {name}", param.data, 0)
            self.logger.log_histogram(name, param, step=self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watched(Told):
    def __init__(self, log: str) -> None:
        super().__init__()
        self.watched = log

    def on_fit_start(self) -> None:
        self.logger.experiment.watch(self.net, log=self.watched)

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def on_train_epoch_end(self) -> None: ...


def told(strategy: str, devices: int = 2, module: Any = None) -> dict[str, Any]:
    """Return what rank 0's experiment has read; each rank has the same samples."""
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    trainer = cpu_trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=Histograms(),
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    trainer.fit(module or Told(), DataLoader(data, batch_size=4))
    experiment = trainer.logger.experiment
    assert isinstance(experiment, Experiment)
    return experiment.seen


@pytest.mark.parametrize("scheme", SCHEMES)
def test_histograms_of_weights_and_gradients_are_those_of_one_device(scheme: str) -> None:
    """Rank 0 alone asked for their elements: a mismatch, or it waited for the others for ever.

    So it did within a logger's own method that only rank 0 runs, however it was called.
    """
    torch.testing.assert_close(told(f"{scheme}_in_process"), told("auto", devices=1))


def test_an_experiment_is_the_loggers_own_outside_of_a_run() -> None:
    logger = Histograms()
    with shared_loggers():
        logger.experiment.name = "first"
        assert logger.experiment.name == "first"
        assert logger.experiment is not logger._experiment
        assert not Histograms.experiment.__get__(logger).seen
    assert logger.experiment is logger._experiment


def test_a_logger_that_watches_gradients_sees_those_of_one_device() -> None:
    """Its hooks are on rank 0 alone: where no rank has parts of a gradient, they see all."""
    expected = told("auto", 1, Watched("gradients"))
    for scheme in ("shard_ddp", "zero2", "zero3"):
        torch.testing.assert_close(told(f"{scheme}_in_process", 2, Watched("gradients")), expected)


@pytest.mark.parametrize(
    ("scheme", "log"),
    [
        ("tensor_parallel", "gradients"),
        ("pipeline_parallel", "gradients"),
        ("pipeline_parallel", "parameters"),
    ],
)
def test_hooks_of_a_logger_on_rank_0_alone_are_refused_where_ranks_have_parts(
    scheme: str, log: str
) -> None:
    """A pipeline showed those of its first stage, unsaid; with split layers, rank 0 waited."""
    with pytest.raises(ConfigError, match=r"the hooks on .*'net.* watch\(\) makes are"):
        told(f"{scheme}_in_process", 2, Watched(log))


class KeepsStates(Told):
    """Its layer has the same hook more than once, as transformers' have after each copy."""

    def on_train_start(self) -> None:
        super().on_train_start()
        for _ in range(1 + self.global_rank):
            self.net[0].register_forward_hook(seen)


def seen(*_: object) -> None:
    """Do nothing with an output."""


@pytest.mark.parametrize("scheme", ["tensor_parallel", "pipeline_parallel"])
def test_a_hook_that_stages_have_more_or_less_often_is_one_hook(scheme: str) -> None:
    """Wav2Vec2 was refused in a pipeline: two hooks on one rank, three on another."""
    expected = told("auto", 1, KeepsStates())
    torch.testing.assert_close(told(f"{scheme}_in_process", 2, KeepsStates()), expected)
