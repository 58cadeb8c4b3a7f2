"""Train the GPT of `train_gpt.py` on ranks that come and go.

    python -m examples.recipes.elastic
    python -m examples.recipes.elastic --ranks 2 --scheme zero3 --snapshot-every 5

Kill any of the printed processes: the others go on. The first process prints the command that adds
one, while training runs. `elastic.sh` does both and shows what comes of it.
"""

import argparse
import logging
import warnings

import lightning as L  # noqa: N812

from examples.train_gpt import GPT, Report, Text
from lightning_shard import ElasticStrategy


class Ranks(L.Callback):
    """Print who trains whenever that changes, and the loss every few steps.

    Args:
        every: Steps from one line to the next.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.generation = self.step = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        """Print on rank 0 after a step, whichever process that is now."""
        if trainer.global_step == self.step:  # more batches make up this step
            return
        self.step = trainer.global_step
        generation = trainer.strategy.generation
        has_changed, self.generation = generation.number != self.generation, generation.number
        if trainer.is_global_zero and (has_changed or self.step % self.every == 0):
            line = f"step {self.step:3}  loss {trainer.callback_metrics['train_loss']:.3f}"
            line += f"  {generation.size} rank{'s' * (generation.size > 1)}"
            if has_changed:
                line += f": {', '.join(generation.members)}"
            print(line, flush=True)


def main() -> None:
    """Train for one epoch, in which every block of text is seen once, and validate."""
    parser = argparse.ArgumentParser(description="Train a GPT on ranks that come and go.")
    parser.add_argument("--ranks", type=int, default=4, help="to begin with")
    parser.add_argument("--scheme", default="zero2", help="shard_ddp, zero1, zero2 or zero3")
    parser.add_argument("--snapshot-every", type=int, default=10, help="optimizer steps")
    parser.add_argument("--context", type=int, default=64, help="bytes of a block")
    parser.add_argument("--batch-size", type=int, default=8, help="blocks, on each first rank")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--report-every", type=int, default=50, help="optimizer steps")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=ElasticStrategy(scheme=options.scheme, snapshot_every=options.snapshot_every),
        accelerator="cpu",
        devices=options.ranks,
        max_epochs=1,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ranks(options.report_every), Report()],
    )
    gpt = GPT(context=options.context, num_layers=4, width=options.width)
    trainer.fit(gpt, datamodule=Text(context=options.context, batch_size=options.batch_size))


if __name__ == "__main__":
    main()
