"""Train a byte-level GPT on English text, on one device or on many.

The model and the data below are ordinary Lightning: nothing in them knows how they are trained.
Which scheme trains them is said on the command line:

    python examples/train_gpt.py
    python examples/train_gpt.py --trainer.strategy zero3_in_process \
        --trainer.accelerator cpu --trainer.devices 4
    python examples/train_gpt.py --config configs/gpt_demo.yaml --data.path my_book.txt

The text is `english.txt`, documentation of CPython, unless `--data.path` names a UTF-8 file.
Its first nine tenths train and the last tenth validates. The yardstick is a bigram model, which
predicts a byte from the one before it by counting pairs in the same training text.
"""

import math
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

NUM_BYTES = 256
ENGLISH = Path(__file__).with_name("english.txt")


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a feed-forward layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations to activations, both of shape (B, T, width)."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh"))

    def attend(self, x: Tensor) -> Tensor:
        """Let each position look at itself and at those before it; (B, T, width)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, heads, head width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, head width)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class GPT(L.LightningModule):
    """GPT-2's architecture over bytes, trained with AdamW, a warm-up and a cosine decay.

    Args:
        context: The most positions that the model can look back on.
        num_layers: The number of blocks.
        num_heads: Attention heads of each block; must divide `width`.
        width: Size of the activation at one position.
        tie_embeddings: Whether the output layer shares the byte embedding's weight.
        learning_rate: The peak, reached after `warmup_steps`.
        weight_decay: For the matrices; biases and norms are not decayed.
        warmup_steps: Steps over which the learning rate rises from zero.
    """

    def __init__(
        self,
        context: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        tie_embeddings: bool = False,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.byte_embedding = nn.Embedding(NUM_BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        if tie_embeddings:
            self.head.weight = self.byte_embedding.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise as GPT-2 does: N(0, 0.02), residual outputs scaled down by the depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("attention_out.weight", "down.weight"))
                scale = math.sqrt(2 * len(self.blocks)) if is_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        """Predict each next byte: (B, T) bytes in, (B, T, 256) logits out."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.byte_embedding(text) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        text, following = batch  # each (B, T)
        return F.cross_entropy(self(text).flatten(0, 1), following.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the validation loss, averaged over batches and ranks."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Warm up linearly, then follow half a cosine down to a tenth."""
        optimizer = self.make_optimizer()
        schedule = LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return an AdamW that decays matrices only."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        peak = self.hparams["learning_rate"]
        return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)

    def learning_rate_factor(self, step: int) -> float:
        """Return the learning rate of `step` as a fraction of the peak."""
        warmup = self.hparams["warmup_steps"]
        num_steps = 0 if step < warmup else self.trainer.estimated_stepping_batches
        return warm_up_and_decay(step, warmup, num_steps)

    @torch.no_grad()
    def generate(self, prompt: str, num_bytes: int, temperature: float = 0.8) -> str:
        """Continue `prompt` by `num_bytes` sampled bytes, the same ones every time.

        Where parameters are sharded over ranks, all of them must call; each gets the same text.
        """
        random = torch.Generator(self.device).manual_seed(0)
        text = torch.tensor([list(prompt.encode())], device=self.device)  # (1, T)
        for _ in range(num_bytes):
            logits = self(text[:, -self.hparams["context"] :])[0, -1].float()
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
            text = torch.cat([text, following[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def warm_up_and_decay(step: int, warmup: int, num_steps: float) -> float:
    """Return a factor that rises linearly to 1, then follows half a cosine down to a tenth.

    It stays 1 after the rise where `num_steps` is infinite: training that ends by hand.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


class Text(L.LightningDataModule):
    """Blocks of consecutive bytes of one text.

    Args:
        path: A UTF-8 file; by default the one beside this program.
        context: Bytes in one block.
        batch_size: Blocks per batch on each rank.
    """

    def __init__(self, path: Path | None = None, context: int = 64, batch_size: int = 32) -> None:
        super().__init__()
        self.path = path or ENGLISH
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the text and split it: nine tenths to train on, the last tenth to validate."""
        text = bytearray(self.path.read_text("utf-8").encode())
        data = torch.frombuffer(text, dtype=torch.uint8).long()
        boundary = len(data) * 9 // 10
        self.train_blocks = self.blocks(data[:boundary])
        self.val_blocks = self.blocks(data[boundary:])
        self.bigram_loss = bigram_loss(*self.train_blocks.tensors, *self.val_blocks.tensors)

    def blocks(self, data: Tensor) -> TensorDataset:
        """Pair each block of `context` bytes with the bytes that follow its positions."""
        windows = data.unfold(0, self.context + 1, self.context)  # (blocks, context + 1)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def train_dataloader(self) -> DataLoader:
        """Iterate over the training blocks in random order."""
        return DataLoader(self.train_blocks, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Iterate over the validation blocks in order."""
        return DataLoader(self.val_blocks, batch_size=self.batch_size)


def bigram_loss(before: Tensor, after: Tensor, val_before: Tensor, val_after: Tensor) -> float:
    """Return the validation loss, in nats, of byte pairs counted in the training blocks."""
    counts = torch.full((NUM_BYTES, NUM_BYTES), 0.1)  # so that no pair is impossible
    ones = torch.ones(before.numel())
    counts.index_put_((before.flatten(), after.flatten()), ones, accumulate=True)
    log_probabilities = (counts / counts.sum(1, keepdim=True)).log()
    return -log_probabilities[val_before, val_after].mean().item()


class Report(L.Callback):
    """Print each validation loss beside the bigram model's; outside of `fit`, a sample too."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: GPT) -> None:
        """Generate on every rank, since each may hold only a part of the model; print on one."""
        if trainer.sanity_checking:
            return
        loss, bigram = trainer.callback_metrics["val_loss"], trainer.datamodule.bigram_loss
        pl_module.print(f"validation loss {loss:.3f} nats per byte (bigram model: {bigram:.3f})")
        if trainer.state.fn == TrainerFn.VALIDATING:
            pl_module.print(f"a sample:\n\n{pl_module.generate('The ', num_bytes=300)}\n")


class TextCLI(LightningCLI):
    """Lightning's command line, with one `--data.context` for both the data and the model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the two contexts."""
        parser.link_arguments("data.context", "model.context")


def main() -> None:
    """Train, then validate once more with the final weights."""
    import lightning_shard  # noqa: F401  the import registers the names of the strategies

    # Worker processes would have nothing to do, a few blocks validated twice do no harm, and
    # Lightning 2.6 uses a name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    defaults = {"max_steps": 300, "gradient_clip_val": 1.0, "callbacks": [Report()]}
    defaults |= {"logger": False, "enable_checkpointing": False}
    options = {"run": False, "seed_everything_default": 0, "save_config_callback": None}
    cli = TextCLI(GPT, Text, trainer_defaults=defaults, **options)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)


if __name__ == "__main__":
    main()
