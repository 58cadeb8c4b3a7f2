"""Models and batches that every contender trains: byte-level, on English that ships with Python.

| name     | what it is                                             | parameters | what it weighs |
|----------|--------------------------------------------------------|------------|----------------|
| `gpt`    | 8 pre-norm transformer blocks of width 512             | 25.5 M     | bytes moved    |
| `few`    | 2 pre-norm transformer blocks of width 1024            | 25.8 M     | few messages   |
| `layers` | 200 residual layers of width 128                       | 3.4 M      | calls made     |
| `wide`   | 8 pre-norm transformer blocks of width 1536            | 227 M      | a GPU's time   |
| `tiny`   | 2 transformer blocks of width 32, for the smoke test   | 0.04 M     | nothing        |
"""

import pydoc_data.topics
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256
SEQUENCE_LENGTH = 64
SEQUENCES_PER_RANK = {"cpu": 4, "cuda": 64}  # by type of device
WEIGHT_SEED = 1234

Batch = tuple[Tensor, Tensor]
"""Input and target tokens, each of shape (B, S), int64."""


class Attention(nn.Module):
    """Causal self-attention with one fused query-key-value projection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H) -> (B, S, H)
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, S, H / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and a four times wider MLP; about 12 H^2 parameters."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class ResidualLayer(nn.Module):
    """One small normalised linear layer; about H^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class LanguageModel(nn.Module):
    """Token and position embeddings, `blocks`, and an untied head; returns the mean loss."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(SEQUENCE_LENGTH, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (B, S), (B, S) -> ()
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, S, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = ("gpt", "few", "layers", "wide", "tiny")


def build_model(name: str) -> LanguageModel:
    """Make a model of `MODELS`, with the same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WEIGHT_SEED)
        match name:
            case "gpt":
                return LanguageModel(512, [TransformerBlock(512, 8) for _ in range(8)])
            case "few":
                return LanguageModel(1024, [TransformerBlock(1024, 16) for _ in range(2)])
            case "wide":
                return LanguageModel(1536, [TransformerBlock(1536, 16) for _ in range(8)])
            case "layers":
                return LanguageModel(128, [ResidualLayer(128) for _ in range(200)])
            case "tiny":
                return LanguageModel(32, [TransformerBlock(32, 2) for _ in range(2)])
    raise ValueError(f"Unknown model {name!r}; choose one of {', '.join(MODELS)}.")


@cache
def _corpus() -> Tensor:
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def make_batch(step: int, rank: int, device: torch.device | None = None) -> Batch:
    """Draw the windows of text that `rank` sees at `step`: the same for every contender."""
    corpus, device = _corpus(), device or torch.device("cpu")
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    last_start = len(corpus) - SEQUENCE_LENGTH - 1
    starts = torch.randint(last_start, (SEQUENCES_PER_RANK[device.type],), generator=generator)
    windows = torch.stack([corpus[start : start + SEQUENCE_LENGTH + 1] for start in starts])
    windows = windows.to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # each (B, S)


def step_flops(model: nn.Module, device: torch.device) -> int:
    """Return the arithmetic of matrices in a rank's step: 6 for each weight and token.

    Embeddings are looked up. Attention over 64 tokens is below 2 % of it, and left out.
    """
    assert isinstance(model, LanguageModel)
    looked_up = model.token.weight.numel() + model.position.weight.numel()
    num_weights = sum(param.numel() for param in model.parameters() if param.dim() > 1) - looked_up
    return 6 * num_weights * SEQUENCES_PER_RANK[device.type] * SEQUENCE_LENGTH
