"""What would a GPT of 100 billion parameters take on 512 GPUs? Asked of a laptop, in a minute.

    python -m examples.dry_run_100b
    python -m examples.dry_run_100b --stages 16 --tensor 8 --world 4096 --zero-stage 2

The model is built on torch's meta device, so that it has shapes and no memory, and the strategy is
the one that would train it: 8 stages, each layer over 8 ranks, 8 such models on different data.
"""

import argparse

import torch
from rich.console import Console
from torch import nn

from examples.train_gpt import GPT
from lightning_shard import HybridParallelStrategy
from lightning_shard.planning.report import DryRun

NUM_LAYERS, WIDTH, NUM_HEADS, CONTEXT = 80, 10240, 80, 2048
VOCABULARY = 51_200
PLAN = {
    "byte_embedding": "embedding_rowwise",
    "blocks.*.qkv": "packed_colwise(3)",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_parted",
}


class WordGPT(GPT):
    """The GPT of `train_gpt.py` with a larger vocabulary; its embedding is its output layer, too.

    Args:
        vocabulary: Rows of the embedding.
        width: As for all of the model.
        options: Of the GPT.
    """

    def __init__(self, vocabulary: int, width: int, **options: int) -> None:
        super().__init__(width=width, **options)
        self.byte_embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.byte_embedding.weight


def dry_run(
    *,
    num_layers: int = NUM_LAYERS,
    stages: int = 8,
    tensor: int = 8,
    world: int = 512,
    zero_stage: int = 1,
    num_microbatches: int = 64,
    precision: str = "bf16-mixed",
) -> DryRun:
    """Say what each rank of `world` holds and sends, with microbatches of one sample."""
    with torch.device("meta"):
        gpt = WordGPT(
            VOCABULARY, WIDTH, context=CONTEXT, num_layers=num_layers, num_heads=NUM_HEADS
        )
        text = torch.zeros(num_microbatches, CONTEXT, dtype=torch.long)
    strategy = HybridParallelStrategy(
        pipeline_parallel_size=stages,
        tensor_parallel_size=tensor,
        zero_stage=zero_stage,
        plan=PLAN,
        num_microbatches=num_microbatches,
    )
    return strategy.dry_run(gpt, [text, text], world_size=world, precision=precision)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="A dry run of a GPT of 100B parameters.")
    parser.add_argument("--num-layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--stages", type=int, default=8, help="pipeline-parallel ranks")
    parser.add_argument("--tensor", type=int, default=8, help="tensor-parallel ranks")
    parser.add_argument("--world", type=int, default=512, help="all ranks")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4))
    parser.add_argument("--num-microbatches", type=int, default=64)
    parser.add_argument("--precision", default="bf16-mixed")
    Console(width=160).print(dry_run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
