"""What hooks keep of parameters, gradients and activations in shards is full after the run."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import (
    HybridParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.errors import ConfigError
from tests.strategies.offload.places import WARNINGS
from tests.strategies.stacks import UpAndDown
from tests.trainers import cpu_trainer, rank_loader

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]

BATCH, NUM_BATCHES, WIDTH = 8, 3, 8


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Average:
    """An average of weights as packages have it: an object that no module knows."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def update(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            before = self.shadow.setdefault(name, param.detach().clone())
            before.mul_(0.5).add_(param.detach(), alpha=0.5)


class Keeps(L.LightningModule):
    """Keeps what it reads in each kind of place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([UpAndDown(torch.tanh) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 12)
        self.average = Average()
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.blocks[1].gradient = self.blocks[1].up.weight.grad.clone()

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.blocks[2].up.weight
        self.average.update(self)
        self.recent.append(weight.detach().clone())
        self.norms += [float(one.norm()) for one in self.recent]
        self.pair = Pair(weight.detach() * 2, self.recent[-1])
        self.nested = {"row": [weight.detach().clone()[1]]}
        self.trainer.datamodule.kept = (weight.detach() + 1,)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(2)
        data = TensorDataset(torch.randn(BATCH * NUM_BATCHES, WIDTH))
        return rank_loader(self.trainer, data, BATCH)


def kept(model: Keeps, data: Data) -> dict[str, Tensor]:
    named = {f"average {name}": value for name, value in model.average.shadow.items()}
    named |= {f"recent {number}": value for number, value in enumerate(model.recent)}
    named |= {f"pair {number}": value for number, value in enumerate(model.pair)}
    named |= {"nested": model.nested["row"][0], "datamodule": data.kept[0]}
    return named | {"gradient": model.blocks[1].gradient}


def trainer(strategy: Any, devices: int) -> L.Trainer:
    return cpu_trainer(
        strategy="auto" if strategy is None else strategy(), devices=devices, max_epochs=1
    )


def run(model: Any, data: Data, strategy: Any, devices: int, num_fits: int = 1) -> Any:
    for _ in range(num_fits):
        trainer(strategy, devices).fit(model, data)
    return model


SCHEMES: dict[str, tuple[Callable[[], Any], int]] = {
    "zero2": (lambda: ZeRO2Strategy(backend="in_process"), 2),
    "zero3": (lambda: ZeRO3Strategy(backend="in_process", bucket_mb=0.0005), 2),
    "offload": (lambda: ZeRO3Strategy(backend="in_process", offload="parameters"), 2),
    "tensor": (lambda: TensorParallelStrategy(backend="in_process"), 2),
    "tensor and stage 3": (
        lambda: TensorParallelStrategy(backend="in_process", tensor_parallel_size=2, zero_stage=3),
        4,
    ),
}


@pytest.mark.few_cases(2)
@pytest.mark.each_value
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_hooks_have_kept_is_of_use_after_the_fit(scheme: str) -> None:
    """Code of one device reads it after the fit, and goes on with it in the next one."""
    strategy, devices = SCHEMES[scheme]
    model, data, alone, its_data = Keeps(), Data(), Keeps(), Data()
    run(model, data, strategy, devices, num_fits=2)
    run(alone, its_data, None, 1, num_fits=2)
    found = kept(model, data)
    for name, value in kept(alone, its_data).items():
        assert type(found[name]) is Tensor, name
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert model.norms == pytest.approx(alone.norms, rel=1e-5)
    assert model.pair.second is model.recent[-1]


class KeepsState(Keeps):
    """Keeps a copy of the state, and puts it into a buffer of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        self.earlier = {name: value.clone() for name, value in self.state_dict().items()}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=4)


def test_a_state_that_a_hook_has_kept_does_not_end_the_next_run() -> None:
    """In a pipeline its elements cannot be read until all ranks come together, at the end."""

    def strategy() -> Any:
        return HybridParallelStrategy(
            backend="in_process", pipeline_parallel_size=2, num_microbatches=2, zero_stage=3
        )

    model = run(KeepsState(), Data(), strategy, 4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(model.earlier[name], value)
    trainer(strategy, 4).predict(model)


class KeepsActivation(Keeps):
    """Keeps what its head returns, each rank of a split layer a part of it."""

    def on_fit_start(self) -> None:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.activation = output.detach()

        self.head.register_forward_hook(keep)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_an_activation_that_a_hook_has_kept_is_copied_for_the_next_run() -> None:
    """An activation that a hook had kept could not be copied for the next run."""

    def strategy() -> Any:
        plan = {"head": "colwise_parted"}
        return TensorParallelStrategy(backend="in_process", plan=plan)

    model = run(KeepsActivation(), Data(), strategy, 2, num_fits=2)
    alone = run(KeepsActivation(), Data(), None, 1, num_fits=2)
    assert type(model.activation) is Tensor
    torch.testing.assert_close(model.activation, alone.activation, rtol=1e-5, atol=1e-6)


class KeepsOnFirst(KeepsState):
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.blocks[2].up.weight
        self.live = weight.detach()
        if self.trainer.is_global_zero:
            self.alone = weight.detach().clone()


def test_what_one_rank_keeps_or_what_shows_a_parameter_is_refused_after_the_run() -> None:
    model = run(KeepsOnFirst(), Data(), SCHEMES["zero3"][0], 2)
    for kept_on in (model.alone, model.live):
        with pytest.raises(ConfigError, match="used after its run"):
            kept_on.norm()
