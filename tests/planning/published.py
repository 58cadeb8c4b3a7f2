"""Published runs, estimated: `python -m tests.planning.published` prints docs/plan.md's tables.

Its last line says how long a search over a model that is larger than any of a laptop's takes.

Every figure of ours comes from a module's shapes and the published profile of the device; nothing
is fitted to a run. Sources: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md of commit
31a17bf (hardware: 96 GB HBM2e of 2.4 TB/s, 500 W; memory is the most of all GPUs), and table 1 of
arXiv:2104.04473, whose floating-point operations are those of its equation 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from time import process_time

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.estimate import Estimate, Estimator
from lightning_shard.planning.machine import MachineProfile, machine_profile
from lightning_shard.planning.search import plan

GIB = 2**30
LLAMA_TOKENS, LLAMA_VOCABULARY = 8192, 128256
GPT_TOKENS, GPT_VOCABULARY = 2048, 51200
A_NODE = 8


class Llama(L.LightningModule):
    """Llama 3.1 as Hugging Face has it."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=LLAMA_VOCABULARY,
            max_position_embeddings=LLAMA_TOKENS,
            num_key_value_heads=8,
            use_cache=False,
            attn_implementation="sdpa",
            **sizes,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


class TrainedLlama(Llama):
    """The same with an optimizer, which a search asks for its state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336}
LLAMA_8B |= {"num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672}
LLAMA_70B |= {"num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_405B = {"hidden_size": 16384, "intermediate_size": 53248}
LLAMA_405B |= {"num_hidden_layers": 126, "num_attention_heads": 128}
LLAMA_PLAN = {
    **{f"model.model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.model.layers.*.self_attn.o_proj": "rowwise",
    "model.model.layers.*.mlp.gate_proj": "colwise",
    "model.model.layers.*.mlp.up_proj": "colwise",
    "model.model.layers.*.mlp.down_proj": "rowwise",
}


class GPTBlock(nn.Module):
    """A block of Megatron's GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        inside = self.before(x)
        parts = [
            layer(inside).view(batch, tokens, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(gelu(self.up(self.between(x))))


class GPT(L.LightningModule):
    """Megatron's GPT, whose embedding is its head."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(GPT_VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(GPT_TOKENS, width))
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, GPT_VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), batch.flatten())


GPT_PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
}


@dataclass(frozen=True, kw_only=True)
class WeakScaling:
    """A row of Megatron's table: a model in billions of parameters, and teraFLOP/s of a GPU."""

    billions: float
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    teraflops: int

    @property
    def dp(self) -> int:
        return self.gpus // self.tp // self.pp

    @property
    def flops(self) -> float:
        """Equation 3: operations of a step, what full checkpointing computes again included."""
        tokens, wide, deep = GPT_TOKENS, self.width, self.layers
        inner = 96 * self.batch * tokens * deep * wide**2
        return inner * (1 + tokens / (6 * wide) + GPT_VOCABULARY / (16 * deep * wide))


_COLUMNS = ("billions", "heads", "width", "layers", "tp", "pp", "gpus", "batch", "teraflops")
_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
WEAK_SCALING = [WeakScaling(**dict(zip(_COLUMNS, row, strict=True))) for row in _TABLE_1]


def torchtitans_h100() -> MachineProfile:
    """Return the profile of an H100 with the memory that torchtitan's had."""
    return replace(machine_profile("h100"), memory_bytes_per_second=2.4e12)


@cache
def _llama(**sizes: int) -> Anatomy:
    with torch.device("meta"):
        model = Llama(**sizes)
    batch = torch.zeros(1, LLAMA_TOKENS, dtype=torch.long, device="meta")
    return Anatomy(model, batch, "bf16-mixed", LLAMA_PLAN)


def llama_8b(gpus: int) -> Estimate:
    """Estimate table 1 (8 GPUs) or 3 (128): FSDP, two samples a GPU, selective checkpointing."""
    made = PlanCandidate(
        pp=1,
        dp=gpus,
        tp=1,
        zero_stage=3,
        schedule="",
        microbatch=2,
        num_microbatches=1,
        checkpointing="selective",
    )
    return Estimator(_llama(**LLAMA_8B), torchtitans_h100(), A_NODE).estimate(made)


def llama_405b(schedule: str) -> Estimate:
    """Estimate table 5: 512 GPUs, parameters of a stage stay gathered as in its pipelines."""
    made = PlanCandidate(
        pp=8,
        dp=8,
        tp=8,
        zero_stage=2,
        schedule=schedule,
        microbatch=1,
        num_microbatches=32,
        checkpointing="full",
    )
    return Estimator(_llama(**LLAMA_405B), torchtitans_h100(), A_NODE).estimate(made)


def in_its_formats(found: Estimate) -> float:
    """Return the peak bytes with bf16 for full parameters, beside fp32 shards, and between blocks.

    FSDP2 rounds whole parameters; under autocast, here, both are in fp32.
    """
    memory = found.memory
    shards = memory.parameters / found.candidate.dp
    return found.peak_bytes - (memory.parameters / 2 - shards) - memory.activations / 2


def megatron(row: WeakScaling) -> Estimate:
    """Estimate a row of the table with the microbatch, which it does not tell, that is fastest."""
    with torch.device("meta"):
        model = GPT(row.width, row.heads, row.layers)
    batch = torch.zeros(1, GPT_TOKENS, dtype=torch.long, device="meta")
    machine = machine_profile("a100")
    estimator = Estimator(Anatomy(model, batch, "16-mixed", GPT_PLAN), machine, A_NODE)
    tried = [estimator.estimate(one) for one in _microbatched(row)]
    fitting = [one for one in tried if one.peak_bytes <= machine.device_memory]
    return min(fitting or tried, key=lambda one: one.seconds)


def _microbatched(row: WeakScaling) -> Iterator[PlanCandidate]:
    for microbatch in (1, 2, 4, 8):
        parts, rest = divmod(row.batch // row.dp, microbatch)
        if not rest and (row.pp == 1 or parts % row.pp == 0):
            yield PlanCandidate(
                pp=row.pp,
                dp=row.dp,
                tp=row.tp,
                zero_stage=0,
                schedule="interleaved_1f1b" if row.pp > 1 else "",
                microbatch=microbatch,
                num_microbatches=parts,
                checkpointing="full",
            )


def of_torchtitan() -> Iterator[tuple[str, float, float, str]]:
    """Yield a figure's name, torchtitan's, ours, and its format."""
    few, many = llama_8b(8), llama_8b(128)
    yield "8B on 8 GPUs, GiB", 82.4, few.peak_bytes / GIB, ".1f"
    yield "8B on 128 GPUs, GiB", 67.0, many.peak_bytes / GIB, ".1f"
    yield "what 128 GPUs save, GiB", 82.4 - 67.0, (few.peak_bytes - many.peak_bytes) / GIB, ".1f"
    yield "tokens/s of a GPU, 128 to 8", 5605 / 5762, few.seconds / many.seconds, ".3f"
    plain, interleaved = llama_405b("1f1b"), llama_405b("interleaved_1f1b")
    yield "405B, 1F1B, GiB", 82.5, plain.peak_bytes / GIB, ".1f"
    yield "405B, interleaved 1F1B, GiB", 72.7, interleaved.peak_bytes / GIB, ".1f"
    yield "tokens/s, interleaved to 1F1B", 1.28, plain.seconds / interleaved.seconds, ".3f"


def of_megatron() -> Iterator[tuple[WeakScaling, Estimate, float]]:
    """Yield rows, our estimates, and our teraFLOP/s of a GPU."""
    for row in WEAK_SCALING:
        found = megatron(row)
        yield row, found, row.flops / row.gpus / found.seconds / 1e12


def tables() -> Iterator[str]:
    """Yield the lines of the two tables."""
    yield "| torchtitan | published | planned | deviation |"
    yield "|---|---|---|---|"
    for name, theirs, ours, shape in of_torchtitan():
        yield f"| {name} | {theirs:{shape}} | {ours:{shape}} | {ours / theirs - 1:+.0%} |"
    yield ""
    yield "| billions | GPUs (tp, pp) | TFLOP/s | planned | deviation | ratio to the row before |"
    yield "|---|---|---|---|---|---|"
    before: tuple[float, float] | None = None
    for row, _, ours in of_megatron():
        grown = ""
        if before is not None:
            theirs, planned = row.teraflops / before[0], ours / before[1]
            grown = f"{theirs:.2f}, planned {planned:.2f}: {planned / theirs - 1:+.0%}"
        yield (
            f"| {row.billions} | {row.gpus} ({row.tp}, {row.pp}) | {row.teraflops} | {ours:.0f} | "
            f"{ours / row.teraflops - 1:+.0%} | {grown} |"
        )
        before = row.teraflops, ours


def planning_time() -> str:
    """Say how long the search over a Llama of 70 billion parameters on 64 devices takes here."""
    with torch.device("meta"):
        model = TrainedLlama(**LLAMA_70B)
        batch = torch.zeros(1, LLAMA_TOKENS, dtype=torch.long)
    began = process_time()
    found = plan(model, batch, devices=64, nodes=8, precision="bf16-mixed")
    billions, seconds = found.num_parameters / 1e9, process_time() - began
    return f"{billions:.1f} billion parameters: {len(found.estimates)} candidates, {seconds:.0f} s"


if __name__ == "__main__":
    for line in tables():
        print(line)
    print(planning_time())
