"""Train a Llama as a job of SLURM, and look at its weights without this package.

    python -m examples.recipes.slurm train --folder build/recipes/slurm --devices 2
    python -m examples.recipes.slurm load --folder build/recipes/slurm

`slurm.sh` is the script for `sbatch`: it does the first with `srun`, makes safetensors of the
checkpoint that the ranks have saved in shards, and does the second.
"""

import argparse
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.train_gpt import Text
from examples.train_llama import Llama, load_llama

BATCHES = 4  # to validate on


def train(options: argparse.Namespace) -> None:
    """Train, and go on where a job that was requeued has stopped."""
    from lightning_shard import ZeRO3Strategy

    L.seed_everything(0, verbose=False)
    model = Llama(num_layers=2, learning_rate=6e-3)
    num_ranks = options.devices * options.num_nodes
    trainer = L.Trainer(
        strategy=ZeRO3Strategy(checkpoint_format="sharded"),
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=options.steps,
        val_check_interval=options.steps,
        limit_val_batches=BATCHES,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        default_root_dir=options.folder,
        callbacks=[ModelCheckpoint(options.folder, save_last=True, enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=Text(batch_size=32 // num_ranks))
    loss = trainer.callback_metrics["val_loss"]
    if trainer.is_global_zero:
        model.network.config.save_pretrained(options.folder)
        print(f"trained on {num_ranks} ranks: validation loss {loss:.3f} nats per byte")


@torch.no_grad()
def load(options: argparse.Namespace) -> None:
    """Validate what `from_pretrained` loads on the same text."""
    network = load_llama(options.folder / "model").eval()
    data = Text(batch_size=32)
    data.setup("validate")
    losses = [
        torch.nn.functional.cross_entropy(network(text).logits.flatten(0, 1), following.flatten())
        for (text, following), _ in zip(data.val_dataloader(), range(BATCHES), strict=False)
    ]
    print(f"loaded by transformers: validation loss {sum(losses) / BATCHES:.3f} nats per byte")


def main() -> None:
    """Do one of both."""
    parser = argparse.ArgumentParser(description="Train a Llama, or look at what was trained.")
    parser.add_argument("what", choices=("train", "load"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="ranks on each node")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    {"train": train, "load": load}[options.what](options)


if __name__ == "__main__":
    main()
