"""Small modules and loops for tests of Fabric; the same values on every rank."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from tests.fabric.loops import fabric_of, strategy_of

STAGES = ("shard_ddp", "zero1", "zero2", "zero3")


class Net(nn.Module):
    """Two blocks between an entrance and a head, with a method that is not `forward`."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.entrance = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.entrance(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def score(self, x: Tensor) -> Tensor:
        return self.features(x).square().mean()

    def penalised(self, x: Tensor) -> Tensor:
        """Return a loss with a penalty of the gradient of its inputs."""
        x = x.detach().requires_grad_()
        out = self(x).square()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.square().sum(1).mean()


def batch_of(fabric: Fabric, step: int = 0, size: int = 4) -> Tensor:
    """Return this rank's part of a step's batch; all ranks' parts are one device's batch."""
    whole = torch.randn(size, 4, generator=torch.Generator().manual_seed(10 + step))
    return whole.chunk(fabric.world_size)[fabric.global_rank]


def on_ranks(name: str, loop: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a loop under a stage in process, and return rank 0's result."""
    devices = options.pop("devices", 2)
    of_fabric = ("precision", "callbacks", "loggers", "plugins")
    made = {key: options.pop(key) for key in of_fabric if key in options}
    return fabric_of(strategy_of(name, **options), devices, **made).launch(loop, *args)


def on_one(loop: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a loop on a single device."""
    return Fabric(accelerator="cpu", devices=1, **options).launch(loop, *args)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-5)


def weights_of(module: Any) -> dict[str, Tensor]:
    """Return a copy of the full weights."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_close(got: Any, expected: Any) -> None:
    """Compare nested numbers and tensors."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
