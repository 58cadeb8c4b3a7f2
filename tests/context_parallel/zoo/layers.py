"""The layers that forwards of the zoo use, and the table that they stand in."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

BATCH, WIDTH, HEADS, LONGEST = 2, 16, 4, 64
Forward = Callable[["Layers", Tensor], Tensor]


class Forwards(dict[str, Forward]):
    """Forwards by their names."""

    def add(self, forward: Forward) -> Forward:
        """Put a forward in, under its name."""
        self[forward.__name__] = forward
        return forward


class Layers(nn.Module):
    """Layers and weights of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.bias = nn.Parameter(torch.randn(HEADS, LONGEST, LONGEST) * 0.1)
        self.w1 = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mhabk = nn.MultiheadAttention(
            WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True
        )
        self.gn, self.bn = nn.GroupNorm(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.prelu, self.emb = nn.PReLU(), nn.Embedding(LONGEST, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, each (B, H, S, D)."""
        return [
            one.view(*one.shape[:-1], HEADS, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)
        ]

    def merge(self, mixed: Tensor) -> Tensor:
        """Return (B, S, E) of the result of attention."""
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found
