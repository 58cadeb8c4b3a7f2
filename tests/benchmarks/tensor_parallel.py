"""Step time of tensor parallel: ours, torch's, and layers written by hand, taking turns.

    python -m tests.benchmarks.tensor_parallel

Two Gloo processes of one thread train one model of attention and MLP pairs with the same plan. A
step is Lightning's: forward, `zero_grad`, backward, `optimizer.step`. `torch` is what Lightning's
ModelParallelStrategy runs in a step, once `configure_model` has called `parallelize_module`.

| name         | what it is                                                            |
|--------------|-----------------------------------------------------------------------|
| `ours`       | `SplitModel`, the engine and the optimizer that the strategy attaches |
| `torch`      | DTensors, by ColwiseParallel and RowwiseParallel                      |
| `hand`       | local linear layers and two autograd functions, as in Megatron-LM     |
| `hand_again` | the same once more: the difference of the two is the noise            |
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from tests.benchmarks.ranks import on_ranks
from tests.benchmarks.side_by_side import options_of, render, take_turns, warmed_up
from tests.benchmarks.timing import Record

PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
}
GOALS = {"torch": ("ours", 1.0), "hand": ("ours", 1.1)}
HEAD_WIDTH = 32
SIZES = {"wide": (512, 4, 8), "narrow": (128, 8, 4), "tiny": (64, 1, 2)}  # width, blocks, batch
LENGTH = 64


class Block(nn.Module):
    """Pre-norm attention and MLP that know no number of heads, only their width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H) -> (B, S, H)
        x = x + self.attend(self.enter(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.enter(self.mlp_norm(x)))))

    def enter(self, x: Tensor) -> Tensor:
        return x

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    """A stack of blocks; the loss is a mean square."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.norm(x), target)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class HandRow(nn.Linear):
    """A rowwise layer: the sum of the ranks' products, and then the bias."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        total: Tensor = _SumOut.apply(F.linear(input, self.weight))  # type: ignore[no-untyped-call]
        return total + self.bias


class HandBlock(Block):
    """The parts of a block that one rank has."""

    def __init__(self, full: Block, rank: int, size: int) -> None:
        nn.Module.__init__(self)
        self.attention_norm, self.mlp_norm = full.attention_norm, full.mlp_norm
        for name, layer in full.named_children():
            if name in ("query", "key", "value", "up"):
                self.add_module(name, _columns(layer, rank, size))
            elif name in ("out", "down"):
                self.add_module(name, _rows(layer, rank, size))

    def enter(self, x: Tensor) -> Tensor:
        result: Tensor = _CopyIn.apply(x)  # type: ignore[no-untyped-call]
        return result


def _columns(layer: Any, rank: int, size: int) -> nn.Linear:
    part = nn.Linear(layer.in_features, layer.out_features // size)
    part.weight.data = layer.weight.data.chunk(size)[rank].clone()
    part.bias.data = layer.bias.data.chunk(size)[rank].clone()
    return part


def _rows(layer: Any, rank: int, size: int) -> HandRow:
    part = HandRow(layer.in_features // size, layer.out_features)
    part.weight.data = layer.weight.data.chunk(size, dim=1)[rank].clone()
    part.bias.data = layer.bias.data.clone()
    return part


def is_split(param: Tensor) -> bool:
    return isinstance(param, DTensor)


class Contender:
    """One way to train the model; `hand` is the base of all."""

    def __init__(self, model: Model) -> None:
        self.model: nn.Module = self.split(model)
        # fused AdamW refuses a group of DTensors and tensors; for all contenders alike
        matrices = [param for param in self.model.parameters() if is_split(param)]
        others = [param for param in self.model.parameters() if not is_split(param)]
        groups = [{"params": params} for params in (matrices, others) if params]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        self.attach()

    def split(self, model: Model) -> nn.Module:
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = [HandBlock(block, rank, size) for block in model.blocks]  # type: ignore[arg-type]
        model.blocks = nn.ModuleList(parts)
        return model

    def attach(self) -> None:
        """Take hold of the optimizer, where that is needed."""

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reducing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step(self, x: Tensor, target: Tensor) -> float:
        with self.computing():
            loss: Tensor = self.model(x, target)
            self.optimizer.zero_grad()
            with self.reducing():
                loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


class Torch(Contender):
    """torch's styles on DTensors, as a user's `configure_model` applies them."""

    def split(self, model: Model) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        return parallelize_module(model, mesh, {name: styles[s]() for name, s in PLAN.items()})


class Ours(Contender):
    """What TensorParallelStrategy makes of the model."""

    def split(self, model: Model) -> nn.Module:
        world = get_backend("gloo").collectives(dist.group.WORLD)  # type: ignore[arg-type]
        alone = get_backend("gloo").collectives(
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        )
        split = SplitModel(model, match_plan(model, PLAN), world)
        self.engine = DataParallelEngine(model, alone, EngineOptions(stage=0), split=split)
        return model

    def attach(self) -> None:
        ShardedOptimizer(self.optimizer, self.engine)

    def computing(self) -> AbstractContextManager[object]:
        return self.engine.step()

    def reducing(self) -> AbstractContextManager[object]:
        return self.engine.backward()


CONTENDERS: dict[str, Callable[[Model], Contender]] = {
    "ours": Ours,
    "torch": Torch,
    "hand": Contender,
    "hand_again": Contender,
}


def time_contenders(rank: int, size: str, num_rounds: int, num_steps: int) -> dict[str, Record]:
    """Train every contender in interleaved rounds; each rank calls."""
    width, num_blocks, batch = SIZES[size]

    def draw(generator: torch.Generator) -> Sequence[Tensor]:
        return torch.randn(2, batch, LENGTH, width, generator=generator).unbind()

    contenders, records = {}, {}
    for name, make in CONTENDERS.items():
        torch.manual_seed(1)
        contenders[name] = make(Model(width, num_blocks))
        records[name] = warmed_up(contenders[name], draw)
    take_turns(contenders, records, draw, num_rounds, num_steps)
    return records


def main() -> None:
    """Run the benchmark of the sizes that the command line names."""
    options = options_of(__doc__, SIZES, ["wide", "narrow"], rounds=20, steps=5)
    for size in options.sizes:
        width, num_blocks, batch = SIZES[size]
        records = on_ranks(time_contenders, size, options.rounds, options.steps)
        title = f"{size}: {num_blocks} blocks of width {width}, batch {batch} x {LENGTH}"
        print(render(title, records, "hand", GOALS))


if __name__ == "__main__":
    main()
