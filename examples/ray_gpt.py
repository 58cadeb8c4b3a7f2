"""Train the GPT of `train_gpt.py` on the workers of a Ray cluster.

    python -m examples.ray_gpt                                      two workers, on this machine
    python -m examples.ray_gpt --strategy tensor_parallel --workers 4
    python -m examples.ray_gpt --address auto --storage /mnt/shared --gpus --workers 16

It needs Ray: `pip install 'lightning-shard[ray]'`. Each epoch, and each `--report-every` steps,
the ranks save a folder together and report it; workers that are lost are started again, up to
`--restarts` times, and go on behind it.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812

import lightning_shard
from examples.train_gpt import GPT, Text
from lightning_shard.ray import RayReportCallback, latest_checkpoint, prepare_trainer

STRATEGIES = {
    "shard_ddp": lightning_shard.DDPStrategy,
    "zero2": lightning_shard.ZeRO2Strategy,
    "zero3": lightning_shard.ZeRO3Strategy,
    "tensor_parallel": lightning_shard.TensorParallelStrategy,
    "pipeline_parallel": lightning_shard.PipelineParallelStrategy,
    "local_sgd": lightning_shard.LocalSGDStrategy,
    "elastic": lightning_shard.ElasticStrategy,
}


def train(config: dict[str, Any]) -> None:
    """Train on one worker, which is one rank; Ray calls this on each."""
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec)")  # there is no work for workers
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=STRATEGIES[config["strategy"]](checkpoint_format="sharded"),
        accelerator="gpu" if config["gpus"] else "cpu",
        devices="auto",  # Ray says how many ranks there are
        max_steps=config["steps"],
        gradient_clip_val=1.0,
        callbacks=[RayReportCallback(every_n_train_steps=config["report_every"])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prepare_trainer(trainer)
    trainer.fit(GPT(), datamodule=Text(), ckpt_path=latest_checkpoint())


def run(options: argparse.Namespace) -> Any:
    """Have Ray run the training on its workers, and return its result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = {
        name: getattr(options, name) for name in ("strategy", "gpus", "steps", "report_every")
    }
    return TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name=options.name,
            storage_path=str(options.storage.absolute()),
            failure_config=FailureConfig(max_failures=options.restarts),
        ),
    ).fit()


def main() -> None:
    """Read the options, connect with the cluster or start one here, and train."""
    parser = argparse.ArgumentParser(description="Train a GPT on the workers of a Ray cluster.")
    parser.add_argument("--strategy", default="zero3", choices=STRATEGIES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--report-every", type=int, default=50)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--address", help="of a running cluster; without it one is started here")
    parser.add_argument("--name", default="ray_gpt", help="of the run; the same name goes on")
    parser.add_argument("--storage", type=Path, default=Path("checkpoints"), help="of every node")
    options = parser.parse_args()
    import ray

    ray.init(address=options.address)
    result = run(options)
    # There is a validation loss once an epoch has ended.
    losses = {name: loss for name, loss in result.metrics.items() if name.endswith("loss")}
    told = ", ".join(f"{name} {loss:.3f}" for name, loss in sorted(losses.items()))
    print(f"step {result.metrics['step']}: {told} nats per byte; {result.checkpoint.path}")


if __name__ == "__main__":
    main()
