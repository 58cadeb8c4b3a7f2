"""Attentions that work out their heads from the whole width, as many are written."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class MinGPT(nn.Module):
    """Three layers, step by step. Source: github.com/karpathy/minGPT before its fused one (MIT)."""

    mask: Tensor

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(1, 1, 16, 16)))
        self.n_head = num_heads

    def forward(self, x: Tensor, layer_past: Tensor | None = None) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Timm(nn.Module):
    """Source: timm 0.4's vision_transformer.py (Apache 2.0)."""

    def __init__(self, width: int, num_heads: int, *, indexed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.indexed = num_heads, indexed
        self.scale = (width // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = (qkv[0], qkv[1], qkv[2]) if self.indexed else qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Swin(nn.Module):
    """A learnt bias of each head, and scores by einsum."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias_table = nn.Parameter(torch.randn(11, num_heads))
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, C // self.num_heads).unbind(2)
        scores = torch.einsum("bihd, bjhd -> bhij", q, k) * self.factor
        place = torch.arange(N)
        bias = self.bias_table[place[:, None] - place + 5]  # (N, N, heads)
        scores = scores + bias.permute(2, 0, 1).unsqueeze(0)
        return self.proj(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(B, N, C))


class Grouped(nn.Module):
    """Rotated, normed, with keys and values for two queries each, as in llama2.c."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.heads_of_queries = num_heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(width // num_heads)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape  # noqa: N806
        width = C // self.heads_of_queries
        q = self.norm(self._rotated(self.wq(x).view(B, T, self.heads_of_queries, width)))
        k = self.norm(self._rotated(self.wk(x).view(B, T, self.heads_of_queries // 2, width)))
        v = self.wv(x).view(B, T, self.heads_of_queries // 2, width)
        k, v = (
            one[:, :, :, None, :]
            .expand(B, T, self.heads_of_queries // 2, 2, width)
            .reshape(B, T, self.heads_of_queries, width)
            for one in (k, v)
        )
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mask = torch.full((1, 1, T, T), float("-inf")).triu(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.type_as(x))
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        """Turn pairs of (B, T, heads, width) by their positions."""
        real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        angles = torch.arange(x.shape[1]).view(1, -1, 1, 1) * torch.ones(x.shape[-1] // 2)
        cos, sin = angles.cos(), angles.sin()
        turned = (real * cos - imaginary * sin, real * sin + imaginary * cos)
        return torch.stack(turned, dim=-1).flatten(3).type_as(x)


class Batched(nn.Module):
    """Heads are samples of a batch, as in fairseq, and ALiBi's slopes count them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape  # noqa: N806

        def by_heads(tensor: Tensor) -> Tensor:
            parts = tensor.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
            return parts.reshape(B * self.num_heads, T, C // self.num_heads)

        q, k, v = (by_heads(one(x)) for one in (self.q_proj, self.k_proj, self.v_proj))
        slopes = 2.0 ** -torch.arange(1, self.num_heads + 1, dtype=x.dtype).view(-1, 1, 1)
        bias = (slopes * torch.arange(T)).repeat(B, 1, 1)
        y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) + bias, dim=-1), v)
        y = y.view(B, self.num_heads, T, C // self.num_heads).transpose(1, 2).reshape(B, T, C)
        return self.out_proj(y)


class NormedQueries(MinGPT):
    """Norms of all heads together, which no rank has."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, layer_past: Tensor | None = None) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = (
            one.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for one in (self.norm(self.query(x)), self.norm(self.key(x)), self.value(x))
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        )


class Uncounted(MinGPT):
    """Says to nobody that it has three heads."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3)
        self.parts = self.n_head
        del self.n_head

    def forward(self, x: Tensor, layer_past: Tensor | None = None) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = (
            one(x).view(B, T, self.parts, C // self.parts).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        )
