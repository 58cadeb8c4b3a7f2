"""Step time of a pipeline: ours and torch's, taking turns; and our idle share beside theory.

    python -m tests.benchmarks.pipeline

Two Gloo processes of one thread train one model of equal blocks, half of them each.

| name          | what it is                                                                   |
|---------------|------------------------------------------------------------------------------|
| `ours`        | the strategy's `training_step` and `backward`, and the optimizer's step      |
| `lightning`   | the same through Lightning's own loop, with its hooks and a logged loss      |
| `torch`       | `torch.distributed.pipelining` by hand: PipelineStage and the schedule's step |
| `torch_again` | the same once more: the difference of the two is the noise                   |

Then the idle shares of ours, as `PipelineTimeline` takes them: measured, beside the replay with the
measured duration of each computation and the closed form.

Ours takes the whole module with its `training_step`, and gives the loss to both ranks; torch's gets
two ready-made halves of the model, and has the loss on the last rank only.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import PipelineParallelStrategy
from lightning_shard.profiling.pipeline_timeline import ActionClock, IdleShares, render_idle_shares
from tests.benchmarks.ranks import NUM_RANKS, on_ranks
from tests.benchmarks.side_by_side import Contender, take_turns, warmed_up
from tests.benchmarks.tensor_parallel import Block
from tests.benchmarks.timing import Ratio, Record, check_losses
from tests.trainers import cpu_trainer

GOAL = 1.05
LENGTH = 64
# Width, blocks, samples of a microbatch: about 120, 32 and 6 ms for both passes of a stage.
SIZES = {"large": (512, 4, 4), "wide": (256, 4, 4), "narrow": (128, 4, 2)}
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
Batch = tuple[Tensor, Tensor]


class Model(L.LightningModule):
    """A stack of blocks; the loss is a mean square."""

    def __init__(self, size: str, *, logs: bool) -> None:
        super().__init__()
        width, num_blocks, _ = SIZES[size]
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.logs = logs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(x, target)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Torch:
    """A loop by hand over torch's pipeline."""

    def __init__(self, size: str, schedule: str, num_microbatches: int) -> None:
        blocks = list(Model(size, logs=False).blocks)
        rank, half = dist.get_rank(), len(blocks) // NUM_RANKS
        part = nn.Sequential(*blocks[rank * half : (rank + 1) * half])
        stage = PipelineStage(part, rank, NUM_RANKS, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, num_microbatches, loss_fn=F.mse_loss)
        self.optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True)

    def step(self, x: Tensor, target: Tensor) -> float:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target, losses=losses)
        self.optimizer.step()
        return sum(loss.item() for loss in losses) / max(1, len(losses))


class Ours:
    """What Lightning's loop calls of the strategy in a step."""

    def __init__(self, trainer: L.Trainer) -> None:
        assert isinstance(trainer.strategy, PipelineParallelStrategy)
        self.strategy = trainer.strategy
        self.optimizer = trainer.strategy.optimizers[0]

    def step(self, *batch: Tensor) -> float:
        loss: Tensor = self.strategy.training_step(batch, 0)
        self.optimizer.zero_grad()
        self.strategy.backward(loss, None)
        self.optimizer.step()
        return loss.item()


class Lightning:
    """Lightning's loop over one batch."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer

    def step(self, *batch: Tensor) -> float:
        loop = self.trainer.fit_loop.epoch_loop.automatic_optimization
        output = loop.run(self.trainer.optimizers[0], 0, {"batch": batch, "batch_idx": 0})
        return output["loss"].item()


class Inside(L.Callback):
    """Calls a function once the Trainer has set everything up, and ends the run."""

    def __init__(self, function: Callable[[L.Trainer], None]) -> None:
        self.function = function

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.function(trainer)
        trainer.should_stop = True


def inside_trainers(
    models: Sequence[Model],
    make_strategy: Callable[[], PipelineParallelStrategy],
    function: Callable[[Sequence[L.Trainer]], None],
    trainers: Sequence[L.Trainer] = (),
) -> None:
    """Call a function inside a running Trainer for each model, one within the other."""
    if not models:
        function(trainers)
        return
    model, *others = models
    inner = Inside(lambda one: inside_trainers(others, make_strategy, function, (*trainers, one)))
    trainer = cpu_trainer(
        devices=NUM_RANKS, strategy=make_strategy(), callbacks=[inner], max_steps=1
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.zeros(1))))


def time_contenders(
    rank: int, size: str, schedule: str, num_microbatches: int, num_rounds: int, num_steps: int
) -> tuple[dict[str, Record], list[IdleShares]]:
    """Train every contender in interleaved rounds, then take ours' timelines; each rank calls."""
    width, _, samples = SIZES[size]
    shape = (num_microbatches * samples, LENGTH, width)

    def draw(generator: torch.Generator | None = None) -> Batch:
        x, target = torch.randn(2, *shape, generator=generator).unbind()
        return x, target

    records: dict[str, Record] = {}
    shares: list[IdleShares] = []

    def compare(trainers: Sequence[L.Trainer]) -> None:
        ours, lightning = trainers
        contenders: dict[str, Contender] = {
            "ours": Ours(ours),
            "lightning": Lightning(lightning),
            "torch": Torch(size, schedule, num_microbatches),
            "torch_again": Torch(size, schedule, num_microbatches),
        }
        records.update({name: warmed_up(one, draw) for name, one in contenders.items()})
        take_turns(contenders, records, draw, num_rounds, num_steps)
        shares.extend(_idle_shares(contenders["ours"], ours, draw, num_rounds))

    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the ranks have met
    models = [Model(size, logs=False), Model(size, logs=True)]
    inside_trainers(models, lambda: _strategy(schedule, num_microbatches), compare)
    if rank == NUM_RANKS - 1:
        check_losses(records, "torch")
    return records, shares


def _strategy(schedule: str, num_microbatches: int) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(
        backend="gloo", schedule=schedule, num_microbatches=num_microbatches
    )


def _idle_shares(
    contender: Contender, trainer: L.Trainer, draw: Callable[[], Batch], num_steps: int
) -> Iterator[IdleShares]:
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineParallelStrategy)
    schedule = strategy.schedule(strategy.num_microbatches)
    for _ in range(num_steps):
        strategy.pipeline.observer = clock = ActionClock(strategy.along("pp"), strategy.root_device)
        contender.step(*draw())
        strategy.pipeline.observer = None
        yield IdleShares.of(clock.gather(), schedule)


def render(title: str, records: dict[str, Record]) -> str:
    """Lay the medians and the ratios to torch's pipeline out as a table."""
    table = Table(
        *("contender", "median ms", "it / torch", "quartiles", "CPU ms", "it / torch", "goal"),
        title=title,
    )
    cpu_of_torch = median(records["torch"].cpu_seconds)
    for name, record in records.items():
        ratio = Ratio.of(record, records["torch"])
        cpu = median(record.cpu_seconds)
        table.add_row(
            name,
            f"{median(record.step_seconds) * 1e3:.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f} - {ratio.high:.3f}",
            f"{cpu * 1e3:.1f}",
            f"{cpu / cpu_of_torch:.3f}",
            f"<= {GOAL}" if name == "ours" else "",
        )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def main() -> None:
    """Run the benchmark of the sizes and schedules that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    for size in options.sizes:
        for schedule in options.schedules:
            turns = (schedule, options.microbatches, options.rounds, options.steps)
            records, shares = on_ranks(time_contenders, size, *turns)
            print(render(f"{size}, {schedule}, {options.microbatches} microbatches", records))
            print(render_idle_shares(shares))


if __name__ == "__main__":
    main()
