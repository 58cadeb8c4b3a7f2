"""Step time of sequences in parts: ours, DeepSpeed's Ulysses attention, torch's, and by hand.

    python -m tests.benchmarks.long_contexts

Two Gloo processes of one thread train one language model, each with half of every sequence between
the blocks. Gradients are averaged by one and the same engine, so that what differs is how sequences
are cut and attention is done. `ours` gets full batches and a module that knows nothing of it; the
others get their half of the batch, and blocks with an attention of their own.

| name         | what it is                                                             |
|--------------|------------------------------------------------------------------------|
| `ours`       | `CutBlocks`, as the strategy attaches it                               |
| `deepspeed`  | `DistributedAttention`, where DeepSpeed is installed                   |
| `torch`      | `context_parallel`, where torch runs it on CPUs                        |
| `hand`       | an autograd function around `all_to_all_single`                        |
| `hand_again` | the same once more: the difference of the two is the noise             |
"""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from tests.benchmarks.ranks import on_ranks
from tests.benchmarks.side_by_side import average_losses, options_of, render, take_turns, warmed_up
from tests.benchmarks.timing import Record

NUM_CLASSES, NUM_HEADS = 256, 8
SIZES = {  # width, blocks, batch, positions
    "long": (256, 4, 1, 2048),
    "short": (256, 4, 4, 256),
    "tiny": (32, 2, 1, 64),
}
GOALS = {"deepspeed": ("ours", 1.0), "torch": ("ours", 1.0)}


class Block(nn.Module):
    """Pre-norm causal attention, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H) -> (B, S, H)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1))
        mixed = self.attend(*qkv.unbind(2))  # each (B, S, heads, D)
        x = x + self.out(mixed.flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return local_attention(query, key, value)


def local_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with whole sequences, (B, S, heads, D)."""
    heads = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    """A language model."""

    def __init__(self, width: int, num_blocks: int, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, width)
        self.blocks = nn.ModuleList(kind(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


class _Exchange(torch.autograd.Function):
    """Heads for positions, or back; (B, S, heads, D)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, join: int) -> Tensor:
        ctx.cut, ctx.join = cut, join
        sent = torch.stack(tensor.chunk(dist.get_world_size(), cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        back: Tensor = _Exchange.apply(grads[0], ctx.join, ctx.cut)  # type: ignore[no-untyped-call]
        return back, None, None


class HandBlock(Block):
    """Exchanges by hand."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = [_Exchange.apply(one, 2, 1) for one in (query, key, value)]  # type: ignore[no-untyped-call]
        mixed: Tensor = _Exchange.apply(local_attention(*own), 1, 2)  # type: ignore[no-untyped-call]
        return mixed


class DeepSpeedBlock(Block):
    """Has DeepSpeed's attention."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        from deepspeed.sequence.layer import DistributedAttention

        self.shared = DistributedAttention(local_attention, dist.group.WORLD, 2, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: Tensor = self.shared(query, key, value, 0)
        return mixed


class Contender:
    """One way to train the model; the base has halves of the batch."""

    kind: type[Block] = HandBlock

    def __init__(self, width: int, num_blocks: int) -> None:
        self.model = Model(width, num_blocks, self.kind)
        world = get_backend("gloo").collectives(dist.group.WORLD)  # type: ignore[arg-type]
        self.engine = DataParallelEngine(self.model, world, EngineOptions(stage=0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        ShardedOptimizer(self.optimizer, self.engine)
        self.attach(world)

    def attach(self, world: Any) -> None:
        """Do what else is needed."""

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(dist.get_world_size(), 1)[dist.get_rank()]

    def step(self, text: Tensor, following: Tensor) -> float:
        with self.engine.step():
            loss = full_tensor(self.model(self.own(text), self.own(following)))
            self.optimizer.zero_grad()
            with self.engine.backward():
                loss.backward()
        self.optimizer.step()
        return float(loss.item())


class DeepSpeed(Contender):
    """DeepSpeed's attention in the blocks."""

    kind = DeepSpeedBlock

    def __init__(self, width: int, num_blocks: int) -> None:
        import deepspeed

        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        super().__init__(width, num_blocks)


class Torch(Contender):
    """torch's context parallel, whose ring has kernels for GPUs."""

    kind = Block

    def step(self, text: Tensor, following: Tensor) -> float:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        text, following = text.clone(), following.clone()
        with context_parallel(mesh, buffers=(text, following), buffer_seq_dims=(1, 1)):
            return super().step(text, following)

    def own(self, tensor: Tensor) -> Tensor:
        return tensor


class Ours(Contender):
    """Full batches, and a module that knows nothing of ranks."""

    kind = Block

    def attach(self, world: Any) -> None:
        CutBlocks(self.model, world)

    def own(self, tensor: Tensor) -> Tensor:
        return tensor


CONTENDERS: dict[str, Callable[[int, int], Contender]] = {
    "ours": Ours,
    "deepspeed": DeepSpeed,
    "torch": Torch,
    "hand": Contender,
    "hand_again": Contender,
}


def time_contenders(
    rank: int, size: str, num_rounds: int, num_steps: int
) -> tuple[dict[str, Record], dict[str, str]]:
    """Train every contender in interleaved rounds; each rank calls.

    Returns:
        What each did, and of those that cannot run here why.
    """
    width, num_blocks, *shape = SIZES[size]

    def draw(generator: torch.Generator) -> Sequence[Tensor]:
        return torch.randint(NUM_CLASSES, (2, *shape), generator=generator).unbind()

    contenders, records, missing = {}, {}, {}
    for name, make in CONTENDERS.items():
        if name == "deepspeed" and find_spec("deepspeed") is None:
            missing[name] = "is not installed"
            continue
        torch.manual_seed(1)
        try:
            contender = make(width, num_blocks)
            records[name] = warmed_up(contender, draw)
        except NotImplementedError as error:
            missing[name] = f"NotImplementedError: {str(error).splitlines()[0][:100]}"
            continue
        contenders[name] = contender
    take_turns(contenders, records, draw, num_rounds, num_steps)
    average_losses(records)
    return records, missing


def main() -> None:
    """Run the benchmark of the sizes that the command line names."""
    options = options_of(__doc__, SIZES, ["long", "short"], rounds=12, steps=3)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for size in options.sizes:
        width, num_blocks, batch, length = SIZES[size]
        records, missing = on_ranks(time_contenders, size, options.rounds, options.steps)
        title = f"{size}: {num_blocks} blocks of width {width}, batch {batch} x {length}"
        print(render(title, records, "hand", GOALS))
        for name, why in missing.items():
            print(f"{name}: {why}")


if __name__ == "__main__":
    main()
