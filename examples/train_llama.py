"""Train a Llama of Hugging Face, unmodified, split over ranks in layers and in stages.

The network is `transformers.LlamaForCausalLM`, over bytes and small enough for a laptop. Nothing in
it knows that each of its layers is shared by two ranks, and its blocks by two pipeline stages:

    lightning-shard fit --config configs/llama_tensor_pipeline.yaml
    lightning-shard fit --config configs/llama_lora_zero3.yaml

The second trains adapters of peft over a frozen network, sharded by ZeRO stage 3. It takes
`pip install transformers`, and peft for the second.
"""

from pathlib import Path

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples.train_gpt import NUM_BYTES


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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimise what is not frozen with AdamW."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["learning_rate"])


class LoRALlama(Llama):
    """The same network, frozen, with low-rank adapters of its attention's layers.

    Args:
        rank: Of the adapters.
        path: As of `Llama`, and so are the others.

    Source:
        LoRA, arXiv:2106.09685; peft's implementation.
    """

    def __init__(
        self,
        rank: int = 4,
        path: Path | None = None,
        width: int = 64,
        num_layers: int = 4,
        learning_rate: float = 3e-3,
    ) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(path, width, num_layers, learning_rate)
        self.save_hyperparameters()
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
        self.network = get_peft_model(self.network, adapters)


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
