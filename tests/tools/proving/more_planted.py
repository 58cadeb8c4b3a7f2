"""More mistakes with one cause each, as users make them; see `planted`."""

from collections.abc import Iterator
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.tools.proving.planted import NUM_CLASSES, OWN_SAMPLER, WIDTH, Net, Planted, samples

RATE = "the learning rate of group 0 of optimizer 0"
LAST = 2


class Codebook(nn.Module):
    """Codes that follow the mean of what is nearest to them, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.cdist(x, self.codes.to(x)).argmin(1)
        nearest = self.codes.to(x)[at]
        with torch.no_grad():
            one_hot = F.one_hot(at, len(self.codes)).to(self.counts)
            self.counts.lerp_(one_hot.sum(0), 0.1)
            sums = one_hot.T @ x.detach().to(self.codes)
            self.codes.lerp_(sums / self.counts[:, None], 0.1)
        return x + (nearest - x).detach()


class Quantised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x)
        return self.head(self.codebook(x))


class Dice(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self(batch[0]).sigmoid()
        truth = (batch[1] > 0).to(found)
        return 1 - 2 * (found * truth).sum() / (found.sum() + truth.sum())


class LoadBalance(Net):
    """The auxiliary loss of a mixture: a product of two means of the batch."""

    def __init__(self) -> None:
        super().__init__(NUM_CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        gates = (4 * self(batch[0])).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), NUM_CLASSES).to(gates)
        return gates[:, 0].mean() + 0.3 * (chosen.mean(0) * gates.mean(0)).sum()


class MixupByNumpy(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        share = float(np.random.beta(1, 1))
        x, y = (share * one + (1 - share) * one.flip(0) for one in batch[:2])
        return F.mse_loss(self(x), y)


class GeneratorOfRank(Net):
    def on_train_start(self) -> None:
        self.generator = torch.Generator().manual_seed(100 + self.global_rank)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        shift = torch.randn(WIDTH, generator=self.generator).to(batch[0])
        return F.mse_loss(self(batch[0] + 0.1 * shift), batch[1])


class RateTimesRanks(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01 * self.trainer.world_size)


class DecayTimesRanks(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = 0.1 * self.trainer.world_size
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=decay)


class LogsMeanOfList(Net):
    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", torch.stack(self.losses).mean(), rank_zero_only=True)


class WeighsByFrequency(Net):
    def __init__(self) -> None:
        super().__init__(NUM_CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        classes = batch[2].clamp(min=0)
        counts = torch.bincount(classes, minlength=NUM_CLASSES).clamp(min=1)
        return F.cross_entropy(self(batch[0]), classes, weight=1 / counts.to(self.head.weight))


class BalancedLosses(Net):
    """Each loss is divided by its own value, so that the sum is always the same number."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        losses = F.mse_loss(out, batch[1]), out.abs().mean()
        return sum(one / one.detach() for one in losses)


class NormsGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.body):
            x = block(x)
            if number == 1 and x.requires_grad:
                x.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
        return self.head(x)


class Queue(Net):
    """MoCo's: what earlier batches gave is compared with."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("queue", F.normalize(torch.randn(16, WIDTH), dim=1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ours, keys = F.normalize(self(batch[0]), dim=1), F.normalize(batch[0], dim=1)
        logits = (ours * keys).sum(1, keepdim=True), ours @ self.queue.clone().to(ours).T
        loss = F.cross_entropy(torch.cat(logits, 1), torch.zeros(len(ours), dtype=torch.long))
        self.queue.copy_(torch.cat([keys.to(self.queue), self.queue])[: len(self.queue)])
        return loss


class RunningNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0).detach().to(self.mean), 0.1)
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1)


class Normed(Net):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Undivided(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        data = samples()
        return (data[at] for at in range(len(data)))


class InitialisesOnRank0(Net):
    def on_train_start(self) -> None:
        if self.global_rank == 0:
            nn.init.zeros_(self.head.weight)


class Langevin(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.add_(0.01 * torch.randn_like(param))


class CountsSamples(Net):
    """A warm-up by the number of samples."""

    num_samples = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_samples += len(batch[0])
        return super().training_step(batch, batch_idx) * min(1.0, self.num_samples / 64)


class RemembersScale(Net):
    scale = 1.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scaled = loss / self.scale
        self.scale = float(loss)
        return scaled


class Perplexity(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("perplexity", loss.exp(), on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Plateau(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        schedule = {"scheduler": plateau, "monitor": "train_loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class SeedsByRank(Normed):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        torch.manual_seed(self.global_rank + 7 * batch_idx)
        return super().training_step(batch, batch_idx)


class SumsGradients(Net):
    """A loop of its own once, which it still reduces gradients for."""

    def on_after_backward(self) -> None:
        for param in self.parameters() if dist.is_initialized() else ():
            dist.all_reduce(param.grad)


class DividedTwice(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = (one[self.global_rank :: self.trainer.world_size] for one in batch[:2])
        return F.mse_loss(self(x), y)


class WithoutPadding(L.LightningDataModule):
    """22 samples, of which rank 0 has 12 and rank 1 has 10."""

    def train_dataloader(self) -> DataLoader:
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = range(12) if rank == 0 else range(12, 22)
        return DataLoader(samples(), batch_size=4, sampler=list(own))


class FollowsBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.center.lerp_(batch[0].mean(0).to(self.center), 0.1)
        return F.mse_loss(self(batch[0] - self.center), batch[1])


class FollowsAfterwards(FollowsBatch):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0] - self.center.clone()), batch[1])
        with torch.no_grad():
            self.center.lerp_(batch[0].mean(0).to(self.center), 0.1)
        return loss


class FunctionalNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return self.attention(x, x, x)[0].mean(1)


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x.reshape(-1, 2, 3)).reshape(-1, WIDTH)


class BackwardTimes(torch.autograd.Function):
    """Passes the gradient back times a number, which ranks have and one device has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class BackwardTimesRanks(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        number = dist.get_world_size() if dist.is_initialized() else 1
        return F.mse_loss(BackwardTimes.apply(self(batch[0]), number), batch[1])


class BackwardTimesRank(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(BackwardTimes.apply(self(batch[0]), 1 + self.global_rank), batch[1])


class DetachesOnRank1(Net):
    """From the second step on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        predicted = self(batch[0])
        if self.global_rank == 1 and batch_idx == 1:
            predicted = predicted.detach() + 0 * predicted
        return F.mse_loss(predicted, batch[1])


class HookOfBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[1].register_full_backward_hook(self.times_ranks)

    def times_ranks(self, module: nn.Module, grads: Any, outputs: Any) -> tuple[Tensor, ...]:
        return tuple(grad * self.trainer.world_size for grad in grads)


def _loss(module: Any, cause: str, **options: Any) -> Planted:
    return Planted(module=module, kind="loss", name="loss", cause=cause, **options)


def _output(module: Any, name: str, cause: str, **options: Any) -> Planted:
    return Planted(module=module, kind="output", name=name, cause=cause, **options)


OWN_BUFFER = "buffer of own samples"
MORE_PLANTED = {
    "codebook": Planted(module=Quantised, kind="buffer", name="codebook.codes", cause=OWN_BUFFER),
    "dice": _loss(Dice, "unequal counts"),
    # until then both ranks send all samples to one class
    "load balance": _loss(LoadBalance, "batch dependent", step=2),
    "mixup by numpy": _output(MixupByNumpy, "body.0.0", "random numbers"),
    "generator of a rank": _output(GeneratorOfRank, "body.0.0", "rank dependent", rank=1),
    "rate times ranks": Planted(
        module=RateTimesRanks, kind="optimizer state", name=RATE, cause="learning rate"
    ),
    "decay times ranks": Planted(
        module=DecayTimesRanks,
        kind="optimizer state",
        name=RATE.replace("learning rate", "weight_decay"),
        cause="optimizer option",
    ),
    "mean of a list": Planted(
        module=LogsMeanOfList,
        kind="metric",
        name="mean_loss",
        cause="unsynchronised log",
        step=LAST,
    ),
    "weights by frequency": _loss(WeighsByFrequency, "batch dependent"),
    "balanced losses": Planted(
        module=BalancedLosses, kind="gradient", name="head.bias", cause="batch dependent"
    ),
    "normed gradient": Planted(
        module=NormsGradient, kind="gradient", name="body.1.0.bias", cause="batch dependent"
    ),
    "queue": Planted(module=Queue, kind="buffer", name="queue", cause=OWN_BUFFER),
    "own batch norm": _output(lambda: Normed(RunningNorm()), "norm", "batch dependent"),
    "functional batch norm": _output(lambda: Normed(FunctionalNorm()), "norm", "batch dependent"),
    "dropout of attention": _output(lambda: Normed(Attention()), "norm.attention[0]", "dropout"),
    "instance norm": Planted(
        module=lambda: Normed(Instances()),
        kind="buffer",
        name="norm.each.running_mean",
        cause=OWN_BUFFER,
    ),
    "undivided": Planted(
        module=Net,
        data=lambda: DataLoader(Undivided(), batch_size=4),
        kind="batch",
        name="samples",
        cause="same samples",
        rank=1,
    ),
    "noise after a step": Planted(
        module=Langevin, kind="weight", name="body.0.0.weight", cause="random numbers"
    ),
    "counts samples": _loss(CountsSamples, "kept from own samples"),
    "remembers its scale": _loss(RemembersScale, "kept from own samples", step=1),
    "perplexity": Planted(
        module=Perplexity, kind="metric", name="perplexity", cause="averaged log", step=LAST
    ),
    "seeds by rank": _output(
        lambda: SeedsByRank(nn.Dropout(0.3)), "norm", "rank dependent", rank=1
    ),
    "sums gradients": Planted(
        module=SumsGradients,
        kind="gradient",
        name="head.bias",
        cause="module hook",
        strategy="shard_ddp",
    ),
    "divided twice": _loss(DividedTwice, "rank dependent"),
    "without padding": _loss(
        Net, "unequal counts", step=LAST, data=WithoutPadding, options=OWN_SAMPLER
    ),
    "follows the batch": _output(FollowsBatch, "body.0.0", OWN_BUFFER),
    "follows afterwards": Planted(
        module=FollowsAfterwards, kind="weight", name="center", cause=OWN_BUFFER
    ),
    "backward times ranks": Planted(
        module=BackwardTimesRanks,
        kind="gradient",
        name="head.bias",
        cause="number of ranks",
        strategy="zero3",
    ),
    "backward times the rank": Planted(
        module=BackwardTimesRank,
        kind="gradient",
        name="head.bias",
        cause="rank dependent",
        options={"accumulate_grad_batches": 2},
    ),
    "detaches on rank 1": Planted(
        module=DetachesOnRank1,
        kind="gradient",
        name="head.bias",
        cause="rank dependent",
        step=1,
        strategy="zero3",
    ),
    "hook of backward": Planted(
        module=HookOfBackward, kind="gradient", name="body.0.0.bias", cause="module hook"
    ),
}
