"""Train a GPT with pipeline, tensor and data parallel at once, on eight ranks of this process.

    python -m examples.train_gpt_3d
    python -m examples.train_gpt_3d --stages 4 --tensor 1 --data 2 --schedule gpipe

The model and the data are those of `train_gpt.py`: nothing in them knows how they are trained.
"""

import argparse
import warnings

import lightning as L  # noqa: N812

from examples.train_gpt import GPT, Report, Text
from lightning_shard import HybridParallelStrategy, ParallelMesh
from lightning_shard.profiling import HeldBytesTable


def main() -> None:
    """Draw the mesh, train, and say what each rank holds."""
    parser = argparse.ArgumentParser(description="Train a GPT in three dimensions.")
    parser.add_argument("--stages", type=int, default=2, help="pipeline-parallel ranks")
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--data", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    mesh = ParallelMesh(pp=options.stages, dp=options.data, tp=options.tensor)
    print(mesh)
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    strategy = HybridParallelStrategy(
        backend="in_process",
        pipeline_parallel_size=options.stages,
        tensor_parallel_size=options.tensor,
        data_parallel_size=options.data,
        zero_stage=options.zero_stage,
        schedule=options.schedule,
    )
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=mesh.world_size,
        max_steps=options.steps,
        val_check_interval=options.steps,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Report(), HeldBytesTable()],
    )
    trainer.fit(GPT(context=64, num_layers=4, width=128), datamodule=Text(context=64))


if __name__ == "__main__":
    main()
