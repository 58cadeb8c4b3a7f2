"""Step time of experts on their ranks: ours, Hugging Face's own, and all experts on each rank.

    python -m tests.benchmarks.experts

Two Gloo processes of one thread train one small Mixtral with AdamW, each on samples of its own; all
contenders start from one checkpoint, and every loss is compared with `ddp`'s. Hugging Face's load
with accelerate, and are left out where it is not installed.

| name           | what it is                                                                 |
|----------------|----------------------------------------------------------------------------|
| `ours`         | experts on two ranks, all else whole on each, gradients in shards          |
| `ours_zero3`   | the same, with all else in shards, too                                     |
| `hf_fsdp`      | `DistributedConfig(ep_size=2, fsdp_size=2)`: FSDP2 shards all else         |
| `hf_tp`        | `DistributedConfig(ep_size=2, tp_size=2)`: all else split for all samples  |
| `ddp`          | torch DDP, all experts on each rank                                        |
| `ddp_again`    | the same once more: the difference of the two is the noise                 |
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.expert_parallel.finding import find_mixtures
from lightning_shard.expert_parallel.shared_experts import SharedExperts
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from tests.benchmarks.ranks import environment, on_ranks
from tests.benchmarks.timing import LOSS_TOLERANCE, LossMismatchError, Ratio, Record, turn_order

NUM_CLASSES, REFERENCE = 256, "ddp"
GOALS = {"hf_fsdp": ("ours_zero3", 1.0), "hf_tp": ("ours", 1.0)}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Mixtral of 8 experts, 2 of them for each token, and a rank's batch."""

    width: int
    expert_width: int
    layers: int
    batch: int
    length: int

    def config(self) -> hf.MixtralConfig:
        """Return the model's configuration."""
        return hf.MixtralConfig(
            vocab_size=NUM_CLASSES,
            hidden_size=self.width,
            intermediate_size=self.expert_width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=self.length,
            sliding_window=None,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )


SIZES = {
    "wide": Size(width=256, expert_width=512, layers=2, batch=2, length=256),
    "deep": Size(width=128, expert_width=256, layers=6, batch=4, length=64),
    "tiny": Size(width=32, expert_width=32, layers=2, batch=2, length=16),
}


class Contender:
    """One way to train the model."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, checkpoint: str) -> None:
        model = hf.MixtralForCausalLM.from_pretrained(checkpoint, **self.options)
        self.model: Any = self.spread(model.train())
        experts = {id(one) for name, one in self.model.named_parameters() if ".experts." in name}
        params = list(self.model.parameters())
        kinds = [[one for one in params if (id(one) in experts) is is_one] for is_one in (0, 1)]
        groups = [{"params": kind} for kind in kinds]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def spread(self, model: Any) -> Any:
        """Return the model, on its ranks."""
        return model

    def own(self, text: Tensor) -> Tensor:
        """Return this rank's samples of all ranks', (W, B, S)."""
        return text[dist.get_rank()]

    def around(self) -> AbstractContextManager[Any]:
        """Inside, a step computes."""
        return nullcontext()

    def step(self, text: Tensor) -> float:
        """Take one step and return the loss of this rank's samples."""
        own = self.own(text)
        with self.around():
            loss: Tensor = self.model(input_ids=own, labels=own).loss
            self.optimizer.zero_grad()
            self.backward(loss)
        self.optimizer.step()
        return float(loss.item())

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()


class AllExperts(Contender):
    """torch DDP."""

    def spread(self, model: Any) -> Any:
        return DistributedDataParallel(model)


class HuggingFace(Contender):
    """Experts on ranks of FSDP2."""

    options: ClassVar[dict[str, Any]] = {"distributed_config": {"ep_size": 2, "fsdp_size": 2}}


class HuggingFaceShared(Contender):
    """Experts on ranks that have all samples, and parts of all else."""

    options: ClassVar[dict[str, Any]] = {"distributed_config": {"ep_size": 2, "tp_size": 2}}

    def own(self, text: Tensor) -> Tensor:
        return text.flatten(0, 1)


class Ours(Contender):
    """An unmodified model."""

    stage = 2

    def __init__(self, checkpoint: str) -> None:
        super().__init__(checkpoint)
        ShardedOptimizer(self.optimizer, self.engine)

    def spread(self, model: Any) -> Any:
        world, alone, reducing = _groups()
        mixtures = find_mixtures(model)
        split = ExpertSplit(model, mixtures, world, DataGroups.of(alone), DataGroups.of(alone))
        options = EngineOptions(stage=self.stage)
        self.engine = DataParallelEngine(model, world, options, reducing, split)
        SharedExperts(mixtures, split, nullcontext, tries=False)
        return model

    def around(self) -> AbstractContextManager[Any]:
        return self.engine.step()

    def backward(self, loss: Tensor) -> None:
        with self.engine.backward():
            loss.backward()


class OursInShards(Ours):
    """All else in shards, too."""

    stage = 3


def _groups() -> tuple[Any, Any, Any]:
    """Return the groups of all ranks, of this one, and a second one of all for gradients."""
    backend: Any = get_backend("gloo")
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    both = [backend.collectives(one) for one in (dist.group.WORLD, alone)]
    return *both, both[0].duplicate()


CONTENDERS: dict[str, Callable[[str], Contender]] = {
    "ours": Ours,
    "ours_zero3": OursInShards,
    "hf_fsdp": HuggingFace,
    "hf_tp": HuggingFaceShared,
    "ddp": AllExperts,
    "ddp_again": AllExperts,
}


def time_contenders(
    rank: int, size: Size, checkpoint: str, num_rounds: int, num_steps: int
) -> dict[str, Record]:
    """Train every contender in interleaved rounds; each rank calls.

    Raises:
        LossMismatchError: A loss is further than `LOSS_TOLERANCE` from `ddp`'s.
    """
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    with environment(variables):
        contenders = {
            name: make(checkpoint)
            for name, make in CONTENDERS.items()
            if "hf" not in name or find_spec("accelerate") is not None
        }
    records = {name: Record() for name in contenders}
    for name, contender in contenders.items():
        _take_turn(contender, records[name], size, 3)
        records[name].step_seconds.clear()
        records[name].cpu_seconds.clear()
    for round_index in range(num_rounds):
        for name in turn_order(list(contenders), round_index):
            _take_turn(contenders[name], records[name], size, num_steps)
    _check_losses(records)
    return records


def _take_turn(contender: Contender, record: Record, size: Size, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(len(record.losses))
    shape = (num_steps, dist.get_world_size(), size.batch, size.length)
    batches = torch.randint(NUM_CLASSES, shape, generator=generator)
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    losses = [contender.step(batch) for batch in batches]
    record.cpu_seconds.append((time.process_time() - cpu_begin) / num_steps)
    dist.barrier()
    record.step_seconds.append((time.perf_counter() - begin) / num_steps)
    of_ranks = torch.tensor(losses)
    dist.all_reduce(of_ranks)
    record.losses += (of_ranks / dist.get_world_size()).tolist()


def _check_losses(records: dict[str, Record]) -> None:
    for name, record in records.items():
        pairs = zip(record.losses, records[REFERENCE].losses, strict=True)
        for step, (loss, expected) in enumerate(pairs):
            if not abs(loss - expected) <= LOSS_TOLERANCE * expected:
                raise LossMismatchError(
                    f"Step {step} of {name!r} has the loss {loss:.7f}, but torch DDP has "
                    f"{expected:.7f}."
                )


def render(name: str, records: dict[str, Record]) -> str:
    """Lay the medians and the ratios of ours to the others out as a table."""
    size = SIZES[name]
    table = Table(
        *("contender", "median ms", "ours / it", "quartiles", "CPU ms", "worst loss", "goal"),
        title=f"{name}: {size.layers} blocks of width {size.width}, 8 experts of "
        f"{size.expert_width}, batch {size.batch} x {size.length} for each rank",
    )
    for contender, record in records.items():
        ours, goal = GOALS.get(contender, ("ours", None))
        ratio = Ratio.of(records[ours], record)
        pairs = zip(record.losses, records[REFERENCE].losses, strict=True)
        table.add_row(
            contender,
            f"{median(record.step_seconds) * 1e3:.2f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f} - {ratio.high:.2f}",
            f"{median(record.cpu_seconds) * 1e3:.2f}",
            f"{max(abs(one / other - 1) for one, other in pairs):.1e}",
            "" if goal is None else f"{ours} <= {goal}",
        )
    noise = Ratio.of(records["ddp_again"], records["ddp"])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
        console.print(f"noise, ddp_again / ddp: {noise.median:.3f}")
    return capture.get()


def main() -> None:
    """Run the benchmark of the sizes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["wide", "deep"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    for name in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = str(Path(folder) / "mixtral")
            torch.manual_seed(1)
            hf.MixtralForCausalLM(SIZES[name].config()).save_pretrained(checkpoint)
            found = on_ranks(
                time_contenders, SIZES[name], checkpoint, options.rounds, options.steps
            )
        print(render(name, found))


if __name__ == "__main__":
    main()
