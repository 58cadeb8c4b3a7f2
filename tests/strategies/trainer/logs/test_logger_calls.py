"""What the steps of a pipeline give loggers: once per batch, what one device would."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy
from lightning_shard.errors import ConfigError
from tests.strategies.stacks import UpAndDown
from tests.strategies.trainer.logs.test_experiments import Histograms
from tests.trainers import cpu_trainer

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated",
    "ignore:The '.*_dataloader' does not have many workers",
)


class Writing(pl.LightningModule):
    def __init__(self, steps: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), *[UpAndDown() for _ in range(2)], nn.Linear(8, 1))
        self.steps = steps

    def training_step(self, batch: Tensor) -> Tensor:
        return self.steps(self, batch)

    def validation_step(self, batch: Tensor) -> Tensor:
        return self.steps(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lines(Histograms):
    """Keeps calls in order, those of its own methods, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    @rank_zero_only
    def add(self, name: str, *values: Any, **kwargs: Any) -> None:
        kept = tree_map_only(Tensor, lambda one: one.detach().clone(), list(values))
        self.lines.append((name, kept, kwargs))


def pipeline(**options: Any) -> Strategy:
    return PipelineParallelStrategy(backend="in_process", num_microbatches=2, **options)


def hybrid() -> Strategy:
    return HybridParallelStrategy(
        backend="in_process", pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2
    )


def written(strategy: Any, devices: int, steps: Any, change: Any = None) -> list[Any]:
    """Return the lines of rank 0's logger after an epoch of training and validation."""
    data = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    trainer = cpu_trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=Lines(),
        log_every_n_steps=1,
    )
    module, loader = Writing(steps), DataLoader(data, batch_size=5)
    if change is not None:
        change(module)
    trainer.fit(module, loader, loader)
    lines: list[Any] = trainer.logger.lines
    return lines


def assert_same(got: list[Any], expected: list[Any]) -> None:
    assert [line[0] for line in got] == [line[0] for line in expected]
    for line, other in zip(got, expected, strict=True):
        leaves, others = tree_leaves(line[1]), tree_leaves(other[1])
        for one, right in zip(leaves, others, strict=True):
            if isinstance(one, str):
                assert one == right
            else:
                torch.testing.assert_close(one, right)
        assert line[2] == other[2]


def everything(module: Any, batch: Tensor) -> Tensor:
    logger = module.logger
    for name, param in module.named_parameters():
        logger.experiment.add(name, param, step=module.global_step)
        logger.experiment[0].add(f"view {name}", param.data, [param.detach()])
    logger.experiment.add("double", module.net[0].weight * 2)
    out = module.net(batch)
    loss = out.square().mean()
    logger.add("data", module.net[0].weight.data)
    logger.add("own method", {"out": out, "weight": module.net[0].weight}, module.training)
    logger.experiment.add("loss", loss, loss.item(), text=f"step {module.global_step}")
    logger.experiment.add("batch", batch)
    if module.global_step == 1:
        logger.experiment.add("only later", out.flatten().tolist(), out.detach().numpy())
    return loss


def hooked(module: Any) -> None:
    for place in ("net.0", "net.1", "net.1.up", "net.2", "net.2.up", "net.3", "net"):
        module.get_submodule(place).register_forward_hook(
            lambda _, args, out, place=place: module.logger.experiment.add(place, args, out)
        )


@pytest.mark.slow
@pytest.mark.parametrize("make", [pipeline, hybrid])
def test_steps_give_loggers_once_per_batch_what_one_device_does(make: Any) -> None:
    """Only rank 0's stage was heard, up to where its step ends: histograms were lost."""
    devices = 2 if make is pipeline else 4
    got, expected = written(make(), devices, everything), written("auto", 1, everything)
    assert_same(got, expected)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "full"}])
def test_forward_hooks_give_loggers_the_values_of_the_stage_that_has_them(options: Any) -> None:
    """Blocks of the later stage were missing, and others came once for each microbatch."""
    steps = lambda module, batch: module.net(batch).square().mean()  # noqa: E731
    got = written(pipeline(**options), 2, steps, hooked)
    assert_same(got, written("auto", 1, steps, hooked))


def in_backward(module: Any, batch: Tensor) -> Tensor:
    out = module.net(batch)
    if out.requires_grad:
        out.register_hook(lambda grad: module.logger.experiment.add("gradient", grad))
    return out.square().mean()


def not_the_trainers(module: Any, batch: Tensor) -> Tensor:
    CSVLogger("").log_metrics({"loss": 1.0})
    return module.net(batch).square().mean()


def unsendable(module: Any, batch: Tensor) -> Tensor:
    module.logger.add("function", lambda: None)
    return module.net(batch).square().mean()


def of_several_stages(module: Any, batch: Tensor) -> Tensor:
    loss = module.net(batch).square().mean()
    module.logger.add("sums", [loss, module.net[0].weight.sum()])
    return loss


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (in_backward, r"add\(\) is called in the backward of a pipeline's microbatch"),
        (not_the_trainers, r"log_metrics\(\) is called .* none of the Trainer's loggers"),
        (unsendable, r"add\(\) .* with something that cannot be sent to other ranks"),
        (of_several_stages, r"add\(\) .* no stage has all of it"),
    ],
)
def test_what_cannot_be_given_once_per_batch_is_refused(steps: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(pipeline(), 2, steps)
