"""A small network of blocks, and the ways in which users compile it or parts of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.strategies.models import Trained

WIDTH = 16


class Block(nn.Module):
    """A residual block of three modules with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class LoopedNet(nn.Module):
    """Embedding, four blocks in a loop, head."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CheckpointedNet(LoopedNet):
    block = CheckpointedBlock


class UnrolledNet(LoopedNet):
    """Each block is called by a line of its own."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        x = second(first(self.embed(x)))
        return self.head(fourth(third(torch.sin(x))))


class NormedNet(LoopedNet):
    """Many modules with parameters beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        x = fourth(third(second(first(self.before(self.embed(x))))))
        return self.head(self.after(x))


class CountGraphs:
    """A backend that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> "CountGraphs":
        return self


class Compiled(Trained):
    """A classifier of vectors."""

    def __init__(
        self,
        way: str = "not",
        backend: Any = "eager",
        net: type[LoopedNet] = LoopedNet,
        *,
        fullgraph: bool = False,
    ) -> None:
        super().__init__()
        self.net: nn.Module = net()
        self.compiled_loss = self.loss_of
        self.how = {"backend": backend, "fullgraph": fullgraph}
        getattr(self, f"compile_{way}")()

    def compile_not(self) -> None:
        """Leave it as it is."""

    def compile_net(self) -> None:
        self.net = torch.compile(self.net, **self.how)

    def compile_net_in_place(self) -> None:
        self.net.compile(**self.how)

    def compile_self(self) -> None:
        self.compile(**self.how)

    def compile_blocks(self) -> None:
        for index, block in enumerate(self.net.blocks):
            self.net.blocks[index] = torch.compile(block, **self.how)

    def compile_blocks_in_place(self) -> None:
        for block in self.net.blocks:
            block.compile(**self.how)

    def compile_method(self) -> None:
        self.compiled_loss = torch.compile(self.loss_of, **self.how)

    def compile_ends(self) -> None:
        self.net.embed.compile(**self.how)
        self.net.head = torch.compile(self.net.head, **self.how)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.compiled_loss(batch)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(num_samples, 4, generator=generator)
        return TensorDataset(inputs, torch.randint(3, (num_samples,), generator=generator))


WAYS = [name.removeprefix("compile_") for name in vars(Compiled) if name.startswith("compile_")][1:]
