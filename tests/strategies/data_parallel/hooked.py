"""Modules whose hooks read, write, load and copy weights, for comparison with a single device."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from tests.strategies.styles import Net
from tests.trainers import SILENT, rank_loader

GLOBAL_BATCH = 12
PLAN = {"net.blocks.*.layer": "colwise_gather_output"}


def tensor(**options: Any) -> TensorParallelStrategy:
    return TensorParallelStrategy(backend="in_process", num_ranks=2, plan=PLAN, **options)


def pipeline(**options: Any) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(backend="in_process", num_ranks=2, **options)


def both(**options: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(
        backend="in_process",
        num_ranks=4,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        num_microbatches=2,
        plan=PLAN,
        **options,
    )


def replicas(**options: Any) -> HybridParallelStrategy:
    """Two pipelines side by side, with optimizer states in shards."""
    return HybridParallelStrategy(
        backend="in_process",
        num_ranks=4,
        pipeline_parallel_size=2,
        zero_stage=1,
        num_microbatches=2,
        **options,
    )


class Hooked(L.LightningModule):
    """The base; `seen` holds what hooks have recorded, on the caller's rank."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[float] = []
        self.build()
        self.double()

    def build(self) -> None:
        """Change the network."""

    @property
    def blocks(self) -> list[Any]:
        """The network's blocks."""
        return list(self.net.blocks)

    def see(self, value: Any) -> None:
        self.seen.append(float(value.detach() if isinstance(value, Tensor) else value))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data: Any = torch.randn(3 * GLOBAL_BATCH, 4, generator=generator, dtype=torch.float64)
        return rank_loader(self.trainer, TensorDataset(data), GLOBAL_BATCH)


def fit(style: type[Hooked], strategy: Any = "auto") -> Hooked:
    torch.manual_seed(7)
    module = style()
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        **SILENT,
        "num_sanity_val_steps": 0,
    }
    L.Trainer(**{**options, **style.options}, strategy=strategy).fit(module)
    return module


def assert_equal(run: Hooked, alone: Hooked) -> None:
    torch.testing.assert_close(run.seen, alone.seen)
    torch.testing.assert_close(run.state_dict(), alone.state_dict())


class Initialises(Hooked):
    """By shape: what depends on fans, rows and columns."""

    def on_fit_start(self) -> None:
        torch.manual_seed(5)
        for module in self.net.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        layers = [block.layer for block in self.blocks]
        if batch_idx == 1:
            torch.manual_seed(6)
            nn.init.eye_(layers[0].weight)
            nn.init.orthogonal_(layers[1].weight)
            nn.init.xavier_uniform_(layers[2].weight)
            nn.init.constant_(self.net.head.weight, 0.1)


class Edits(Hooked):
    """By index, through `.data`, by assignment, as vectors."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        first, second, third = (block.layer for block in self.blocks)
        first.weight[0].zero_()
        second.weight.data[:, 0] = 0.5
        third.weight.data = torch.eye(8, dtype=torch.float64)
        self.net.head.weight.copy_(nn.functional.normalize(self.net.head.weight, dim=1))
        torch._foreach_mul_(list(self.net.blocks.parameters()), 0.9)
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector * 0.99, self.parameters())


class Reads(Hooked):
    """Numbers of weights, and what is computed with them and with gradients."""

    def numbers(self) -> None:
        for param in self.parameters():
            self.see(param.norm())
            self.see(param.mean())
            self.see(param.numel())
            self.see(len(param) + param.shape[-1])
        self.see(torch.linalg.matrix_norm(self.blocks[1].layer.weight, 2))

    def on_fit_start(self) -> None:
        self.numbers()

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.numbers()
        self.see(self.net(torch.ones(3, 4, dtype=torch.float64)).sum())

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            assert param.grad is not None
            self.see(param.norm() / (1 + param.grad.norm()))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        before = [param.detach().clone() for param in self.parameters()]
        super().optimizer_step(*args, **kwargs)
        after = self.parameters()
        self.see(sum((new - old).norm() for new, old in zip(after, before, strict=True)))


class ByGradients(Hooked):
    """Weights changed by gradients, and gradients by weights."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.data -= 0.05 * param.grad
            param.grad += 0.1 * param
            param.mul_(1 - 0.01 * param.grad.abs().max())
        self.net.head.bias.grad = torch.ones_like(self.net.head.bias)


class Loads(Hooked):
    """A full state of another network."""

    def on_fit_start(self) -> None:
        torch.manual_seed(9)
        self.net.load_state_dict(Net().double().state_dict())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            kept = copy.deepcopy(self.net.state_dict())
            self.see(sum(value.abs().sum() for value in kept.values()))
            torch.manual_seed(8)
            self.net.load_state_dict(Net().double().state_dict())
        if batch_idx == 2:
            self.blocks[1].load_state_dict(self.blocks[0].state_dict())


class Teaches(Hooked):
    """A teacher that is copied from the student when the training starts."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return (self.net(batch[0]) - target - 1).square().mean()

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.lerp_(other, 0.3)
        self.see(sum(param.norm() for param in self.teacher.parameters()))


Style = Callable[[], Any]
STYLES: list[type[Hooked]] = [Initialises, Edits, Reads, ByGradients, Loads, Teaches]
