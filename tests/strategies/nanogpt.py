"""A GPT as nanoGPT writes it: its attention works out heads from the whole width in its forward.

Source: github.com/karpathy/nanoGPT, model.py (MIT); without generation and loading.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """With a bias or without."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """Fused projections, in one kernel or step by step."""

    bias: Tensor

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        flash: bool = True,
        context: int = 16,
    ) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = num_heads
        self.n_embd = width
        self.dropout = dropout
        self.flash = flash
        mask = torch.tril(torch.ones(context, context)).view(1, 1, context, context)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            dropout = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, width: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(
        self, width: int, num_heads: int, *, bias: bool, dropout: float, flash: bool, context: int
    ) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width, bias=bias)
        self.attn = CausalSelfAttention(
            width, num_heads, bias=bias, dropout=dropout, flash=flash, context=context
        )
        self.ln_2 = LayerNorm(width, bias=bias)
        self.mlp = MLP(width, bias=bias, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Embedding and head are one matrix."""

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        width: int = 32,
        num_heads: int = 4,
        num_layers: int = 2,
        bias: bool = False,
        dropout: float = 0.0,
        flash: bool = True,
    ) -> None:
        super().__init__()
        blocks = [
            Block(width, num_heads, bias=bias, dropout=dropout, flash=flash, context=context)
            for _ in range(num_layers)
        ]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(blocks),
                "ln_f": LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * num_layers))
            elif param.ndim > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss
