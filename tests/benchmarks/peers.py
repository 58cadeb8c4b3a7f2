"""Every scheme beside what a user would write without it: whole fits of a Trainer, taking turns.

    python -m tests.benchmarks.peers [--only NAME ...]

A GPT of 15 million parameters on Gloo processes of one thread, fused AdamW. In each match one set
of ranks trains it in three ways: by our strategy, by the peer's, and by the peer's once more, of
which the difference is the noise.

| match                          | the peer                                                        |
|--------------------------------|-----------------------------------------------------------------|
| `shard_ddp`, `zero2`, `zero3`  | Lightning's `ddp`; its ModelParallelStrategy with `fully_shard` |
| `tensor`, `tensor_shm`         | ModelParallelStrategy with `parallelize_module`                 |
| `2d`, `2d_shm`                 | both, on four ranks                                             |
| `1f1b`, `gpipe`, `interleaved` | a loop by hand over `torch.distributed.pipelining`              |

Lightning has no pipelines, so the peer's has no Trainer around it there, and ours has.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.strategies import DDPStrategy as LightningDDP
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_shard import (
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.benchmarks.fitted import Fitted
from tests.benchmarks.ranks import Ranks
from tests.benchmarks.side_by_side import average_losses, take_turns, warmed_up
from tests.benchmarks.tensor_parallel import PLAN, Block
from tests.benchmarks.timing import Ratio, Record, check_losses

WIDTH, NUM_BLOCKS, VOCABULARY, LENGTH, BATCH, MICROBATCHES = 384, 8, 256, 64, 16, 8
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}
_QUIET: dict[str, Any] = {"announce": False}


class GPT(L.LightningModule):
    """Embeddings, pre-norm blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, V)
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return loss_of(self(tokens), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class Parallelized(GPT):
    """As a user of ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        rows, columns = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if columns.size() > 1:
            parallelize_module(self, columns, {name: STYLES[s]() for name, s in PLAN.items()})
        if rows.size() > 1:
            for block in self.blocks:
                fully_shard(block, mesh=rows)
            fully_shard(self, mesh=rows)


class Piece(nn.Module):
    """Neighbouring blocks, with the embeddings if they are the first, the head if the last."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        whole, size = GPT(), NUM_BLOCKS // count
        self.blocks = nn.Sequential(*whole.blocks[index * size : (index + 1) * size])
        self.token = whole.token if index == 0 else None
        self.position = whole.position if index == 0 else None
        self.last = nn.Sequential(whole.norm, whole.head) if index == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position.weight
        result: Tensor = self.last(self.blocks(x))
        return result


class TorchPipeline:
    """A loop by hand over torch's pipeline, with its stages in turns."""

    def __init__(self, schedule: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.size = size
        count = size * (1 + (schedule == "interleaved_1f1b"))
        places = range(rank, count, size)
        pieces = [Piece(place, count) for place in places]
        pairs = zip(places, pieces, strict=True)
        stages = [PipelineStage(one, at, count, torch.device("cpu")) for at, one in pairs]
        given: Any = stages if count > size else stages[0]
        self.schedule = SCHEDULES[schedule](given, MICROBATCHES, loss_fn=loss_of)
        self.optimizer = adamw([param for piece in pieces for param in piece.parameters()])

    def step(self, *batch: Tensor) -> float:
        """Take one step; the last rank has the loss."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        given = batch[:1] if dist.get_rank() == 0 else ()
        ends = {"target": batch[1], "losses": losses} if dist.get_rank() == self.size - 1 else {}
        self.schedule.step(*given, **ends)
        self.optimizer.step()
        return sum(loss.item() for loss in losses) / max(1, len(losses))


class Fit:
    """A Trainer's fit of the GPT."""

    def __init__(self, make: type[GPT], strategy: Callable[[], Any]) -> None:
        self._fit = Fitted(make(), strategy=strategy)

    def step(self, *batch: Tensor) -> float:
        """Take one step and return the loss of this rank."""
        return self._fit.step((batch[0], batch[1])).item()


@dataclass(frozen=True)
class Match:
    """What trains side by side.

    Attributes:
        ours: Makes our strategy.
        peer: Makes the peer.
        num_ranks: Number of ranks.
        rows: Number of ranks with samples of their own.
        has_loss: Whether every rank of the peer has a loss, or the last alone.
    """

    ours: Callable[[], Any]
    peer: Callable[[], Any]
    num_ranks: int = 2
    rows: int = 1
    has_loss: bool = True


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return fused AdamW, which wants DTensors and others in groups of their own."""
    params = list(params)
    kinds = [[one for one in params if isinstance(one, DTensor) is kind] for kind in (True, False)]
    groups = [{"params": kind} for kind in kinds if kind]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def _meshed(rows: int, columns: int) -> Callable[[], Any]:
    sizes = {"data_parallel_size": rows, "tensor_parallel_size": columns}
    return partial(Fit, Parallelized, partial(ModelParallelStrategy, **sizes))


def _pipelined(schedule: str) -> Match:
    options = {"schedule": schedule, "num_microbatches": MICROBATCHES, "backend": "gloo"}
    ours = partial(PipelineParallelStrategy, **options)
    return Match(ours, partial(TorchPipeline, schedule), has_loss=False)


def _tensor(backend: str) -> Callable[[], Any]:
    return partial(TensorParallelStrategy, plan=PLAN, backend=backend)


def _two_dimensional(backend: str) -> Callable[[], Any]:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "zero_stage": 3}
    return partial(HybridParallelStrategy, **sizes, plan=PLAN, backend=backend)


MATCHES = {
    "shard_ddp": Match(partial(DDPStrategy, **_QUIET), partial(Fit, GPT, LightningDDP), rows=2),
    "zero2": Match(partial(ZeRO2Strategy, **_QUIET), _meshed(2, 1), rows=2),
    "zero3": Match(partial(ZeRO3Strategy, **_QUIET), _meshed(2, 1), rows=2),
    "tensor": Match(_tensor("gloo"), _meshed(1, 2)),
    "tensor_shm": Match(_tensor("shm"), _meshed(1, 2)),
    "2d": Match(_two_dimensional("gloo"), _meshed(2, 2), num_ranks=4, rows=2),
    "2d_shm": Match(_two_dimensional("shm"), _meshed(2, 2), num_ranks=4, rows=2),
    "1f1b": _pipelined("1f1b"),
    "gpipe": _pipelined("gpipe"),
    "interleaved": _pipelined("interleaved_1f1b"),
}


def time_match(rank: int, name: str, num_rounds: int, num_steps: int) -> dict[str, Record]:
    """Train ours and the peer in interleaved rounds; each rank calls."""
    match = MATCHES[name]
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(match.num_ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = "29500"  # the ranks have met
    row = rank * match.rows // match.num_ranks

    def draw(generator: torch.Generator) -> Sequence[Tensor]:
        shape = (match.rows, BATCH // match.rows, LENGTH)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)[row]
        return tokens, tokens.roll(-1, 1)

    makers = {"ours": partial(Fit, GPT, match.ours), "peer": match.peer, "peer_again": match.peer}
    contenders = {name: make() for name, make in makers.items()}
    records = {name: warmed_up(one, draw) for name, one in contenders.items()}
    take_turns(contenders, records, draw, num_rounds, num_steps)
    if match.has_loss:
        average_losses(records)
    for record in records.values():
        losses = torch.tensor(record.losses)
        dist.broadcast(losses, src=match.num_ranks - 1)
        record.losses = losses.tolist()
    check_losses(records, "peer")
    return records


def main() -> None:
    """Run the matches that the command line names, and print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=MATCHES, default=list(MATCHES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    columns = ("match", "step time over the peer's", "quartiles", "processor time", "noise")
    table = Table(*columns, title="Ours over the peer")
    for name in options.only:
        ranks = Ranks(MATCHES[name].num_ranks)
        records = ranks.run(time_match, name, options.rounds, options.steps)
        ratio = Ratio.of(records["ours"], records["peer"])
        cpu = {key: median(record.cpu_seconds) for key, record in records.items()}
        noise = Ratio.of(records["peer_again"], records["peer"]).median
        table.add_row(
            name,
            f"{ratio.median:.2f}",
            f"{ratio.low:.2f} - {ratio.high:.2f}",
            f"{cpu['ours'] / cpu['peer']:.3f}",
            f"{noise:.2f}, {cpu['peer_again'] / cpu['peer']:.3f}",
        )
        print(f"{name}: done", flush=True)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
