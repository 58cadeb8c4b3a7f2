"""Train the GPT of `train_gpt.py` with a loop of one's own, on Lightning Fabric.

    python -m examples.fabric_gpt                                       two ranks of this process
    python -m examples.fabric_gpt --strategy zero3 --devices 2          two processes, over Gloo
    python -m examples.fabric_gpt --strategy zero3 --accelerator gpu --devices 8

Each loss is the one that `train_gpt.py` logs of that step. What `--save` writes, a Trainer resumes
from: `trainer.fit(model, ckpt_path=...)`.
"""

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from examples.train_gpt import GPT, Text, warm_up_and_decay
from lightning_shard.fabric import trainer_checkpoint


def train(fabric: Fabric, options: argparse.Namespace) -> list[float]:
    """Train on this rank, validate, and return the losses, averaged over ranks."""
    fabric.seed_everything(0, verbose=False)
    gpt, text = GPT(), Text()
    text.setup("fit")
    factor = partial(warm_up_and_decay, warmup=gpt.hparams["warmup_steps"], num_steps=options.steps)
    model, optimizer = fabric.setup(gpt, gpt.make_optimizer())
    model.mark_forward_method("loss")
    schedule = LambdaLR(optimizer, factor)
    loader, val_loader = fabric.setup_dataloaders(text.train_dataloader(), text.val_dataloader())
    losses: list[float] = []
    while len(losses) < options.steps:
        for batch in loader:
            loss = model.loss(batch)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(fabric.all_reduce(loss.detach()).item())
            if len(losses) % 20 == 0:
                fabric.print(f"step {len(losses)}: loss {losses[-1]:.3f}, gradient {norm:.2f}")
            if len(losses) == options.steps:
                break
    fabric.print(
        f"validation loss {validate(fabric, model, val_loader):.3f} nats per byte "
        f"(bigram model: {text.bigram_loss:.3f})"
    )
    if options.save is not None:
        epoch, batch_number = divmod(options.steps, len(loader))
        place = {"global_step": options.steps, "epoch": epoch, "batch": batch_number}
        fabric.save(options.save, trainer_checkpoint(model, optimizer, schedule, **place))
    return losses


@torch.no_grad()
def validate(fabric: Fabric, model: Any, loader: DataLoader) -> float:
    """Return the mean loss of all batches of all ranks."""
    model.eval()
    mean = torch.stack([model.loss(batch) for batch in loader]).mean()
    model.train()
    return fabric.all_reduce(mean).item()


def main() -> None:
    """Read the options, and launch the ranks."""
    parser = argparse.ArgumentParser(description="Train a GPT with a loop of one's own.")
    parser.add_argument("--strategy", default="zero3_in_process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, help="where a checkpoint goes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec)")  # there is no work for workers
    fabric = Fabric(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
    )
    fabric.launch(train, options)


if __name__ == "__main__":
    main()
