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

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers as hf
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
from tests.benchmarks.side_by_side import average_losses, options_of, render, take_turns, warmed_up
from tests.benchmarks.timing import Record

NUM_CLASSES = 256
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
    """Train every contender in interleaved rounds; each rank calls."""

    def draw(generator: torch.Generator) -> Sequence[Tensor]:
        shape = (dist.get_world_size(), size.batch, size.length)
        return (torch.randint(NUM_CLASSES, shape, generator=generator),)

    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    with environment(variables):
        contenders = {
            name: make(checkpoint)
            for name, make in CONTENDERS.items()
            if "hf" not in name or find_spec("accelerate") is not None
        }
    records = {name: warmed_up(one, draw) for name, one in contenders.items()}
    take_turns(contenders, records, draw, num_rounds, num_steps)
    average_losses(records)
    return records


def main() -> None:
    """Run the benchmark of the sizes that the command line names."""
    options = options_of(__doc__, SIZES, ["wide", "deep"], rounds=12, steps=3)
    for name in options.sizes:
        size = SIZES[name]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = str(Path(folder) / "mixtral")
            torch.manual_seed(1)
            hf.MixtralForCausalLM(size.config()).save_pretrained(checkpoint)
            records = on_ranks(time_contenders, size, checkpoint, options.rounds, options.steps)
        title = f"{name}: {size.layers} blocks of width {size.width}, 8 experts of "
        title += f"{size.expert_width}, batch {size.batch} x {size.length} for each rank"
        print(render(title, records, "ddp", GOALS))


if __name__ == "__main__":
    main()
