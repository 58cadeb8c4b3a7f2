"""Train a Mixtral of Hugging Face whose experts lie on different ranks.

    python -m examples.recipes.experts
    python -m examples.recipes.experts --backend auto --accelerator gpu --devices 8 --experts 4

Each rank has some of the experts of every block, and all other parameters; tokens travel to their
experts and back. The network is `transformers.MixtralForCausalLM`, unmodified.
"""

import argparse
import warnings
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor

from examples.train_gpt import NUM_BYTES, Text
from lightning_shard import HybridParallelStrategy

try:
    from transformers import MixtralConfig, MixtralForCausalLM
except ModuleNotFoundError as error:
    raise SystemExit(f"This recipe needs {error.name}: pip install transformers") from None


class Mixture(L.LightningModule):
    """A Mixtral over bytes, with four experts in each block, two of which a byte is given to.

    Args:
        balance: Weight of the loss that keeps experts equally busy.
    """

    def __init__(self, balance: float = 0.02) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=NUM_BYTES,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            output_router_logits=balance > 0,
            router_aux_loss_coef=balance,
            use_cache=False,
        )
        self.network = MixtralForCausalLM(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the bytes, in nats, and of the routers."""
        text, _ = batch  # labels are shifted by the network
        return self.network(input_ids=text, labels=text).loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss of the bytes alone."""
        text, _ = batch
        out = self.network(input_ids=text, labels=text, output_router_logits=False)
        self.log("val_loss", out.loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimise with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=6e-3)


class Load(L.Callback):
    """Prints how many tokens each expert was given."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask on every rank, print on one."""
        loads = trainer.strategy.expert_load().values()
        if trainer.is_global_zero:
            for load in loads:
                print(f"{load.name}: the busiest expert has {load.imbalance:.2f} times the mean")


def train(
    strategy: Any, data: L.LightningDataModule, steps: int, model: Mixture, **options: Any
) -> L.Trainer:
    """Train for so many steps, and validate."""
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        limit_val_batches=8,
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
    """Train, and say how busy the experts were."""
    parser = argparse.ArgumentParser(description="Train a mixture of experts.")
    parser.add_argument("--experts", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--backend", default="in_process", help="auto: each rank is a process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    options = vars(parser.parse_args())
    experts, backend = options.pop("experts"), options.pop("backend")
    strategy = HybridParallelStrategy(backend=backend, expert_parallel_size=experts)
    L.seed_everything(0, verbose=False)
    data = Text(batch_size=32 // options["devices"])
    trainer = train(strategy, data, model=Mixture(), callbacks=Load(), **options)
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val_loss']:.2f} nats per byte")


if __name__ == "__main__":
    main()
