"""Modules with one mistake each, and where and why ranks differ from one device by it.

The mistakes train without a word on several ranks; each would be right, or at least the same thing,
on one device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, NUM_CLASSES = 6, 4


def samples(num_samples: int = 64) -> TensorDataset:
    """Return inputs, targets and classes, of which some are to be ignored."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    classes[::5] = -100
    return TensorDataset(
        torch.randn(num_samples, WIDTH, generator=generator),
        torch.randn(num_samples, 1, generator=generator),
        classes,
    )


def loader() -> DataLoader:
    return DataLoader(samples(), batch_size=4)


class Net(L.LightningModule):
    """Nothing is wrong with this one."""

    def __init__(self, num_outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SumOfErrors(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1], reduction="sum")


class SumByHand(SumOfErrors):
    """Returns no loss; its gradient was called one of which each sample depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class DroppingBlock(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class FunctionalDropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[1] = DroppingBlock(WIDTH, WIDTH)


class UnsynchronisedLog(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("error", loss, on_epoch=True, rank_zero_only=True)
        return loss


class Contrastive(Net):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = F.normalize(self(batch[0])) @ F.normalize(batch[0]).T
        return F.cross_entropy(logits, torch.arange(len(logits)))


class GatheredWithoutGradients(Contrastive):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ours = F.normalize(self(batch[0]))
        theirs = self.all_gather(F.normalize(self.head(batch[0]))).reshape(-1, WIDTH)
        at = torch.arange(len(ours)) + self.trainer.global_rank * len(ours)
        return F.cross_entropy(ours @ theirs.T, at)


class BranchOfRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.1 if self.global_rank == 1 else x)


class LateBranchOfRank(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * self.head.bias.sum() * (self.global_rank == 1 and batch_idx == 1)


class WritesBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.center.mul_(0.9).add_(0.1 * batch[0].mean(0))
        return super().training_step(batch, batch_idx)


class DividesByRunningLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scaled = loss / self.scale.clone()
        self.scale.lerp_(loss.detach().to(self.scale), 0.5)
        return scaled


class PenaltyCountedTwice(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = self.head.weight.square().sum()
        return (
            super().training_step(batch, batch_idx)
            + self.all_gather(penalty, sync_grads=True).sum()
        )


class TimesRanks(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.world_size


class TiedByMemory(Net):
    """A frozen embedding whose memory the output layer shares, as another parameter."""

    def __init__(self) -> None:
        super().__init__(NUM_CLASSES)
        self.embedding = nn.Embedding(NUM_CLASSES, WIDTH)
        self.embedding.requires_grad_(False)
        self.head.weight.data = self.embedding.weight.data

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        classes = batch[2].clamp(min=0)
        return F.cross_entropy(self(batch[0] + self.embedding(classes)), classes)


class LateNorms(torch.optim.SGD):
    """Scales steps at large rates by norms, after two steps, where those are unlike a trial's."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or param.numel() == 0:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", torch.zeros(())) + 1
                norm = float(param.grad.norm())
                is_late = state["step"] > 2 and group["lr"] > 0.05
                factor = norm if is_late and 0.02 < norm < 2 else 1.0
                with torch.no_grad():
                    param.sub_(group["lr"] * factor * param.grad)
        return loss


class NeedsMatrices(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LateNorms(self.parameters(), lr=0.1)


class DividesByAccumulation(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss / self.trainer.accumulate_grad_batches


class IgnoresClasses(Net):
    def __init__(self) -> None:
        super().__init__(NUM_CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[2], ignore_index=-100)


class WeighsClasses(IgnoresClasses):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        weight = torch.arange(1.0, NUM_CLASSES + 1).to(self.head.weight)
        return F.cross_entropy(self(batch[0]), batch[2].clamp(min=0), weight=weight)


class HardestHalf(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        errors = F.mse_loss(self(batch[0]), batch[1], reduction="none").flatten()
        return errors.topk(len(errors) // 2).values.mean()


class Standardise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1)


class Standardised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.standardise = Standardise()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.standardise(x))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.noise(x))


class ClampsGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))


class RemembersLoss(Net):
    last_loss = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last_loss = float(loss)
        return loss


class ScalesGradients(RemembersLoss):
    def on_after_backward(self) -> None:
        for param in self.parameters():
            param.grad.mul_(self.last_loss)


class ClipsByOwnLoss(RemembersLoss):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.1 * self.last_loss, "norm")


class RateOfOwnLoss(RemembersLoss):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * self.last_loss


class NudgesWeights(RemembersLoss):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.bias.add_(0.01 * self.last_loss)


class Scaler(Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for param in pl_module.parameters():
            param.grad.mul_(pl_module.last_loss)


class OrderOfRank(L.LightningDataModule):
    """Each rank draws the order of the whole data set for itself."""

    def train_dataloader(self) -> DataLoader:
        data = samples()
        rank = dist.get_rank() if dist.is_initialized() else 0
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        sampler = DistributedSampler(data, num_ranks, rank, shuffle=True, seed=rank)
        return DataLoader(data, batch_size=4, sampler=sampler)


class SameForAll(L.LightningDataModule):
    def train_dataloader(self) -> Iterator[Any] | DataLoader:
        return loader()


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A mistake, and what names it: the step, kind and name of the first value that differs.

    Attributes:
        rank: Rank whose value it is, where it is one rank's alone.
    """

    module: Callable[[], L.LightningModule]
    kind: str
    name: str
    cause: str
    step: int = 0
    rank: int | None = None
    data: Callable[[], Any] = loader
    strategy: str = "zero2"
    options: dict[str, Any] = field(default_factory=dict)


OWN_SAMPLER = {"use_distributed_sampler": False}
# The last of the three steps, at whose end what was logged is compared.
LAST = 2
PLANTED = {
    "sum": Planted(module=SumOfErrors, kind="loss", name="loss", cause="sum"),
    "sum by hand": Planted(module=SumByHand, kind="gradient", name="head.bias", cause="sum"),
    "batch norm": Planted(module=BatchNormed, kind="output", name="norm", cause="batch norm"),
    "dropout": Planted(module=Dropping, kind="output", name="drop", cause="dropout"),
    "functional dropout": Planted(
        module=FunctionalDropping, kind="output", name="body.1", cause="dropout"
    ),
    "unsynchronised log": Planted(
        module=UnsynchronisedLog, kind="metric", name="error", cause="unsynchronised log", step=LAST
    ),
    "contrastive": Planted(module=Contrastive, kind="loss", name="loss", cause="batch dependent"),
    "gather without gradients": Planted(
        module=GatheredWithoutGradients,
        kind="gradient",
        name="head.bias",
        cause="gather without gradients",
    ),
    "branch of a rank": Planted(
        module=BranchOfRank, kind="output", name="body.0.0", cause="rank dependent", rank=1
    ),
    "late branch of a rank": Planted(
        module=LateBranchOfRank, kind="loss", name="loss", cause="rank dependent", step=1
    ),
    "buffer": Planted(
        module=WritesBuffer, kind="buffer", name="center", cause="buffer of own samples"
    ),
    "buffer in the loss": Planted(
        module=DividesByRunningLoss, kind="buffer", name="scale", cause="buffer of own samples"
    ),
    "penalty twice": Planted(
        module=PenaltyCountedTwice, kind="loss", name="loss", cause="counted once per rank"
    ),
    "times ranks": Planted(module=TimesRanks, kind="loss", name="loss", cause="number of ranks"),
    "needs matrices": Planted(
        module=NeedsMatrices,
        kind="weight",
        name="body.1.0.weight",  # the first that lies on two ranks
        cause="full matrices",
        step=2,
    ),
    "divides by accumulation": Planted(
        module=DividesByAccumulation,
        kind="gradient",
        name="head.bias",
        cause="accumulation scale",
        options={"accumulate_grad_batches": 2},
    ),
    "ignored classes": Planted(
        module=IgnoresClasses, kind="loss", name="loss", cause="unequal counts"
    ),
    "weighted classes": Planted(
        module=WeighsClasses, kind="loss", name="loss", cause="unequal counts"
    ),
    "hardest half": Planted(module=HardestHalf, kind="loss", name="loss", cause="batch dependent"),
    "standardised": Planted(
        module=Standardised, kind="output", name="standardise", cause="batch dependent"
    ),
    "noise": Planted(module=Noisy, kind="output", name="noise", cause="random numbers"),
    "parameter hook": Planted(
        module=ClampsGradient, kind="gradient", name="head.weight", cause="parameter hook"
    ),
    "scales gradients": Planted(
        module=ScalesGradients, kind="gradient", name="head.bias", cause="module hook"
    ),
    "callback": Planted(
        module=RemembersLoss,
        kind="gradient",
        name="head.bias",
        cause="callback",
        options={"callbacks": [Scaler()]},
    ),
    "clips by its own loss": Planted(
        module=ClipsByOwnLoss, kind="gradient", name="head.bias", cause="clipping"
    ),
    "nudges weights": Planted(
        module=NudgesWeights, kind="weight", name="head.bias", cause="module hook"
    ),
    "order of a rank": Planted(
        module=Net,
        data=OrderOfRank,
        kind="batch",
        name="samples",
        cause="repeated samples",
        step=1,  # when a sample comes a second time
        options=OWN_SAMPLER,
    ),
    "same samples": Planted(
        module=Net,
        data=SameForAll,
        kind="batch",
        name="samples",
        cause="same samples",
        rank=1,
        options=OWN_SAMPLER,
    ),
}
