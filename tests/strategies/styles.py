"""Ways of writing a LightningModule, and what a run under a strategy is compared with."""

from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shard import DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from tests.trainers import SILENT

STRATEGIES = [DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy]
GLOBAL_BATCH = 12
NUM_BATCHES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class Net(nn.Module):
    def __init__(self, num_outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Automatic(L.LightningModule):
    """The base of all styles; `history` holds what they record, averaged over the ranks."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.history: list[float] = []

    def record(self, value: Tensor) -> None:
        self.history.append(float(self.trainer.strategy.reduce(value.detach().clone())))

    def loss(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        self.record(loss)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return self.batches(NUM_BATCHES)

    def batches(self, num: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        dataset = TensorDataset(torch.randn(num * GLOBAL_BATCH, 4, generator=generator))
        num_ranks = self.trainer.world_size
        sampler = DistributedSampler(dataset, num_ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(dataset, GLOBAL_BATCH // num_ranks, sampler=sampler)

    def callbacks(self) -> list[Callback]:
        return []


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


# --- automatic optimization ------------------------------------------------------------------


class Accumulated(Automatic):
    options: ClassVar = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}


class ClippedByValue(Automatic):
    options: ClassVar = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class DirectParameters(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) * self.scale + self.shift).square().mean()
        self.record(loss)
        return loss


class ForwardsElsewhere(Automatic):
    """Validation in between, generation in a hook, and a teacher in eval mode in the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.eval()
        with torch.no_grad():
            target = self.net(2 * batch[0])
        self.train()
        loss = (self.net(batch[0]) - 0.3 * target).square().mean()
        self.record(loss)
        return loss

    def val_dataloader(self) -> Any:
        return self.batches(2)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.record(self.net(batch[0]).square().mean())

    def on_train_epoch_end(self) -> None:
        x = torch.ones(2, 4)
        with torch.no_grad():
            for _ in range(3):
                out = self.net(x)
                x = torch.cat([out, x[:, :1]], dim=1)
        self.record(x.sum())


class ZeroedInPlace(Automatic):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroedTwice(Automatic):
    """Zeroes in place what the loop then sets to None."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.zero_grad(set_to_none=False)


class Thawed(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.net.head.requires_grad_(True)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.net.head.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            backbone = [param for param in self.parameters() if not param.requires_grad]
            self.net.requires_grad_(True)
            self.optimizers().add_param_group({"params": backbone, "lr": 0.02})


class Backbone(Automatic):
    """Lightning's own finetuning callback."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net.blocks

    def configure_optimizers(self) -> Optimizer:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=0.1)

    def callbacks(self) -> list[Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)]


class ScheduledAccumulation(Automatic):
    options: ClassVar = {"max_epochs": 3}

    def callbacks(self) -> list[Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2})]


class StoppedEarly(ForwardsElsewhere):
    options: ClassVar = {"max_epochs": 8}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def callbacks(self) -> list[Callback]:
        return [EarlyStopping("loss", patience=1, min_delta=100.0)]


# --- manual optimization ---------------------------------------------------------------------


class ManualAccumulation(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch[0]))
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


class BareBackward(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch[0]).backward()
        optimizer.step()


class TwoBackwards(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self.net(batch[0])
        self.manual_backward(out.square().mean(), retain_graph=True)
        self.manual_backward(out.abs().mean())
        self.manual_backward(self.loss(2 * batch[0]))
        optimizer.step()


class ManualSchedule(Manual):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def evaluate() -> Tensor:
            loss = self.loss(batch[0])
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=evaluate)
        self.lr_schedulers().step()
        self.record(torch.tensor(optimizer.param_groups[0]["lr"]))


class Adversarial(Manual):
    """A generator and its critic, each with its own optimizer."""

    toggle = False

    def __init__(self) -> None:
        super().__init__()
        self.critic = Net(num_outputs=1)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5),
        )

    def generate(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(x), x[:, :1]], dim=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, loss in zip(
            self.optimizers(), (self.generator_loss, self.critic_loss), strict=True
        ):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            value = loss(batch[0])
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            self.record(value)

    def generator_loss(self, x: Tensor) -> Tensor:
        return self.critic(self.generate(x)).square().mean()

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generate(x).detach()
        return (self.critic(x) - 1).square().mean() + self.critic(fake).square().mean()


class AdversarialToggled(Adversarial):
    toggle = True


class AdversarialClosures(Adversarial):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, loss in zip(
            self.optimizers(), (self.generator_loss, self.critic_loss), strict=True
        ):

            def evaluate(optimizer: Any = optimizer, loss: Any = loss) -> Tensor:
                value = loss(batch[0])
                optimizer.zero_grad()
                self.manual_backward(value)
                self.record(value)
                return value

            with optimizer.toggle_model():
                optimizer.step(closure=evaluate)


class AdversarialOfOneGraph(Adversarial):
    """One generated batch for both; the critic steps first."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0]
        generator, critic = self.optimizers()
        fake = self.generate(x)
        critic_loss = (self.critic(x) - 1).square().mean()
        critic_loss = critic_loss + self.critic(fake.detach()).square().mean()
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        loss = self.critic(fake).square().mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.record(critic_loss)
        self.record(loss)


# --- what is compared ------------------------------------------------------------------------


def train(style: type[Automatic], strategy: Any = "auto", **options: Any) -> Automatic:
    """Fit a style on one device, or with a strategy."""
    torch.manual_seed(0)
    model = style()
    make_trainer(strategy, model.callbacks(), **(style.options | options)).fit(model)
    return model


def make_trainer(strategy: Any, callbacks: list[Callback], **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 2, **SILENT}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **(defaults | options),
    )


def ranks(stage: int, num_ranks: int = 2) -> Any:
    return STRATEGIES[stage](backend="in_process", num_ranks=num_ranks, bucket_mb=1e-4)


def fit_twice(strategy: Callable[[], Any]) -> dict[str, Tensor]:
    """Fit one module again and again; return its state."""
    model = train(Automatic, strategy())
    make_trainer(strategy(), []).fit(model)
    make_trainer(strategy(), []).fit(model)
    return dict(model.state_dict())


def check(style: type[Automatic], strategy: Any) -> None:
    """Compare a fit with one device's."""
    alone, together = train(style), train(style, strategy)
    torch.testing.assert_close(together.history, alone.history, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        dict(together.state_dict()), dict(alone.state_dict()), rtol=1e-4, atol=1e-6
    )


AUTOMATIC = [
    Automatic,
    Accumulated,
    Backbone,
    ClippedByValue,
    DirectParameters,
    ForwardsElsewhere,
    ScheduledAccumulation,
    StoppedEarly,
    Thawed,
    ZeroedInPlace,
    ZeroedTwice,
]
MANUAL = [
    ManualAccumulation,
    BareBackward,
    TwoBackwards,
    ManualSchedule,
    Adversarial,
    AdversarialToggled,
    AdversarialClosures,
    AdversarialOfOneGraph,
]
