"""Pre-train a Llama of Hugging Face with pipeline, tensor and data parallel at once.

    python -m examples.recipes.llama_3d
    python -m examples.recipes.llama_3d --stages 4 --tensor 1 --schedule gpipe
    torchrun --nproc-per-node 8 -m examples.recipes.llama_3d --backend auto --accelerator gpu

By default its eight ranks are threads of this process. The model and the data are those of
`train_llama.py` and `train_gpt.py`: nothing in them knows how they are trained.
"""

import argparse
import warnings
from typing import Any

import lightning as L  # noqa: N812

from examples.train_gpt import Report, Text
from examples.train_llama import Llama
from lightning_shard import HybridParallelStrategy, ParallelMesh
from lightning_shard.profiling import HeldBytesTable


def train(strategy: Any, data: L.LightningDataModule, steps: int, **options: Any) -> L.Trainer:
    """Train for so many steps, and validate."""
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    L.seed_everything(0, verbose=False)
    model = Llama(width=64, num_layers=2, learning_rate=1e-2)
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, datamodule=data)
    return trainer


def main() -> None:
    """Draw the mesh, train, and say what each rank holds."""
    parser = argparse.ArgumentParser(description="Pre-train a Llama in three dimensions.")
    parser.add_argument("--stages", type=int, default=2, help="pipeline-parallel ranks")
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--data", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", default="in_process", help="auto: each rank is a process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--num-nodes", type=int, default=1)
    options = parser.parse_args()
    mesh = ParallelMesh(pp=options.stages, dp=options.data, tp=options.tensor)
    print(mesh)
    strategy = HybridParallelStrategy(
        backend=options.backend,
        pipeline_parallel_size=options.stages,
        tensor_parallel_size=options.tensor,
        data_parallel_size=options.data,
        zero_stage=options.zero_stage,
        schedule=options.schedule,
        num_microbatches=options.stages,
    )
    train(
        strategy,
        Text(context=64, batch_size=64 // options.data),
        options.steps,
        accelerator=options.accelerator,
        devices=mesh.world_size // options.num_nodes,
        num_nodes=options.num_nodes,
        callbacks=[Report(), HeldBytesTable()],
    )


if __name__ == "__main__":
    main()
