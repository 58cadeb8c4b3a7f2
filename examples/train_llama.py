"""Train a Llama of Hugging Face, unmodified, split over ranks in layers and in stages.

The network is `transformers.LlamaForCausalLM`, over bytes and small enough for a laptop. Nothing in
it knows that each of its layers is shared by two ranks, and its blocks by two pipeline stages:

    lightning-shard fit --config configs/llama_tensor_pipeline.yaml

It takes `pip install transformers`. `recipes/` trains it in three dimensions, trains adapters over
it, and trains it as a job of SLURM.
"""

from pathlib import Path

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from examples.train_gpt import NUM_BYTES

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs {error.name}: pip install transformers") from None


class Llama(L.LightningModule):
    """A causal language model of Hugging Face over bytes.

    Args:
        path: A folder with a Llama's `config.json` and weights, whose tokens bytes stand for; by
            default a small one is made with random weights.
        width: Size of the activation at one position, of the small one.
        num_layers: Blocks of the small one.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        path: Path | None = None,
        width: int = 64,
        num_layers: int = 4,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = small_llama(width, num_layers) if path is None else load_llama(path)

    def forward(self, text: Tensor) -> Tensor:
        """Predict each next byte: (B, T) bytes in, (B, T, tokens) logits out."""
        return self.network(input_ids=text, use_cache=False).logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        text, following = batch  # each (B, T)
        loss = F.cross_entropy(self(text).flatten(0, 1), following.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the validation loss, averaged over batches and ranks."""
        text, following = batch
        loss = F.cross_entropy(self(text).flatten(0, 1), following.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimise what is not frozen with AdamW."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["learning_rate"])


def small_llama(width: int, num_layers: int) -> LlamaForCausalLM:
    """Make a Llama over bytes with random weights."""
    config = LlamaConfig(
        vocab_size=NUM_BYTES,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def load_llama(path: Path) -> LlamaForCausalLM:
    """Load a Llama from a folder of Hugging Face's; nothing is downloaded."""
    return LlamaForCausalLM.from_pretrained(path, local_files_only=True)
