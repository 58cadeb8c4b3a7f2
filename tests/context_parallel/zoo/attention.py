"""Attention, written in many ways.

Each is the forward of a block that has the layers of `Layers`, called with hidden states (B, S, E).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.context_parallel.zoo.layers import BATCH, HEADS, WIDTH, Forwards

FORWARDS = Forwards()


@FORWARDS.add
def sdpa_float_mask_inf(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = (
        torch.full((length, length), -math.inf).triu(1)[None, None].expand(BATCH, 1, length, length)
    )
    return x + m.merge(F.scaled_dot_product_attention(*m.heads(x), attn_mask=mask))


@FORWARDS.add
def sdpa_float_mask_of_each_sample(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.zeros(BATCH, HEADS, length, length)
    mask[1, :, :, length // 2 :] = -1e9
    return x + m.merge(F.scaled_dot_product_attention(*m.heads(x), attn_mask=mask))


@FORWARDS.add
def sdpa_bool_mask_computed_from_x(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.arange(length)[None] <= torch.arange(length)[:, None]
    q, k, v = m.heads(x)
    gate = torch.sigmoid(x.mean(-1))  # (BATCH,length)
    bias = torch.where(mask[None, None], gate[:, None, None, :], torch.tensor(-math.inf))
    return x + m.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


@FORWARDS.add
def sdpa_bias_rows_from_x(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    gate = torch.sigmoid(x.mean(-1))
    bias = gate[:, None, :, None].expand(BATCH, 1, x.shape[1], x.shape[1]) * torch.arange(
        x.shape[1]
    )
    return x + m.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


@FORWARDS.add
def alibi(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    rel = (torch.arange(length)[None] - torch.arange(length)[:, None]).float()
    bias = slopes[:, None, None] * rel + torch.full((length, length), -math.inf).triu(1)
    return x + m.merge(F.scaled_dot_product_attention(*m.heads(x), attn_mask=bias[None]))


@FORWARDS.add
def rel_bias_learned(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    return x + m.merge(
        F.scaled_dot_product_attention(
            *m.heads(x), attn_mask=m.bias[:, :length, :length].unsqueeze(0)
        )
    )


@FORWARDS.add
def written_out(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = s.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    return x + m.merge(s.softmax(-1) @ v)


@FORWARDS.add
def written_out_rel_bias(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    s = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5 + m.bias[:, :length, :length]
    return x + m.merge(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


@FORWARDS.add
def written_einsum(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(BATCH, x.shape[1], 3, HEADS, -1).unbind(2)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    a = s.softmax(-1)
    return x + m.out(torch.einsum("bhqk,bkhd->bqhd", a, v).reshape(BATCH, x.shape[1], WIDTH))


@FORWARDS.add
def keys_transposed_linear_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    kv = k.softmax(-2).transpose(-1, -2) @ v
    return x + m.merge(q.softmax(-1) @ kv)


@FORWARDS.add
def qk_norm(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return x + m.merge(
        F.scaled_dot_product_attention(
            F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=m.logit_scale.exp().item()
        )
    )


@FORWARDS.add
def rotary_half(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    d = q.shape[-1]
    f = torch.arange(length)[:, None] * (0.1 ** torch.arange(d // 2))
    emb = torch.cat([f, f], -1)

    def rot(t: Tensor) -> Tensor:
        return t * emb.cos() + torch.cat([-t[..., d // 2 :], t[..., : d // 2]], -1) * emb.sin()

    return x + m.merge(F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True))


@FORWARDS.add
def rotary_complex(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    d = q.shape[-1]
    f = torch.polar(
        torch.ones(length, d // 2), torch.arange(length)[:, None] * (0.1 ** torch.arange(d // 2))
    )

    def rot(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * f).flatten(3)

    return x + m.merge(F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True))


@FORWARDS.add
def rotary_stack(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    d = q.shape[-1]
    f = torch.arange(length)[:, None] * (0.1 ** torch.arange(d // 2))

    def rot(t):
        a, b = t[..., ::2], t[..., 1::2]
        return torch.stack([a * f.cos() - b * f.sin(), a * f.sin() + b * f.cos()], -1).flatten(-2)

    return x + m.merge(F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True))


@FORWARDS.add
def mha_causal_flag(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return x + m.mha(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


@FORWARDS.add
def mha_weights(m: Any, x: Tensor) -> Tensor:
    o, w = m.mha(x, x, x, need_weights=True)
    return x + o + w.sum(-1, keepdim=True) * m.extra + w.amax(-1, keepdim=True)


@FORWARDS.add
def mha_weights_each(m: Any, x: Tensor) -> Tensor:
    o, w = m.mha(x, x, x, need_weights=True, average_attn_weights=False)
    return x + o + w.square().sum((1, 3)).unsqueeze(-1)


@FORWARDS.add
def mha_bias_kv(m: Any, x: Tensor) -> Tensor:
    return x + m.mhabk(x, x, x, need_weights=False)[0]


@FORWARDS.add
def mha_cross_other(m: Any, x: Tensor) -> Tensor:
    mem = m.emb(torch.arange(7)).expand(BATCH, 7, WIDTH)
    return x + m.mha(x, mem, mem, need_weights=False)[0]


@FORWARDS.add
def mha_keys_pooled(m: Any, x: Tensor) -> Tensor:
    mem = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
    return x + m.mha(x, mem, mem, need_weights=False)[0]


@FORWARDS.add
def perceiver_queries(m: Any, x: Tensor) -> Tensor:
    lat = m.emb(torch.arange(5)).expand(BATCH, 5, WIDTH)
    lat = m.mha(lat, x, x, need_weights=False)[0]
    return x + m.mha(x, lat, lat, need_weights=False)[0]


@FORWARDS.add
def windows(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    w = 4
    pad = -length % w
    y = F.pad(x, (0, 0, 0, pad)).view(BATCH, -1, w, WIDTH)
    q, k, v = [o.view(*o.shape[:-1], HEADS, -1).transpose(-2, -3) for o in m.qkv(y).chunk(3, -1)]
    o = (
        F.scaled_dot_product_attention(q, k, v)
        .transpose(-2, -3)
        .flatten(-2)
        .flatten(1, 2)[:, :length]
    )
    return x + m.out(o)


@FORWARDS.add
def windows_view(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if length % 4:
        return x
    y = x.view(BATCH, length // 4, 4, WIDTH)
    q, k, v = [o.view(*o.shape[:-1], HEADS, -1).transpose(-2, -3) for o in m.qkv(y).chunk(3, -1)]
    o = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        .transpose(-2, -3)
        .reshape(BATCH, length, WIDTH)
    )
    return x + m.out(o)


@FORWARDS.add
def windows_batch(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if length % 4:
        return x
    y = x.reshape(BATCH * length // 4, 4, WIDTH)
    return x + m.mha(y, y, y, need_weights=False)[0].reshape(BATCH, length, WIDTH)


@FORWARDS.add
def strided(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if length % 4:
        return x
    y = x.view(BATCH, 4, length // 4, WIDTH).transpose(1, 2)
    q, k, v = [o.view(*o.shape[:-1], HEADS, -1).transpose(-2, -3) for o in m.qkv(y).chunk(3, -1)]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
    return x + m.out(o.transpose(1, 2).reshape(BATCH, length, WIDTH))


@FORWARDS.add
def sdpa_3d(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    return x + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@FORWARDS.add
def sdpa_flat_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = [o.flatten(0, 1) for o in m.heads(x)]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).view(BATCH, HEADS, x.shape[1], -1)
    return x + m.merge(o)


@FORWARDS.add
def bmm_flat_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = [o.reshape(BATCH * HEADS, x.shape[1], -1) for o in m.heads(x)]
    length = x.shape[1]
    a = torch.baddbmm(
        torch.zeros(BATCH * HEADS, length, length), q, k.transpose(1, 2), beta=1, alpha=0.3
    ).softmax(-1)
    return x + m.merge(torch.bmm(a, v).view(BATCH, HEADS, length, -1))


@FORWARDS.add
def bloom_alibi_baddbmm(m: Any, x: Tensor) -> Tensor:
    q, k, v = [o.reshape(BATCH * HEADS, x.shape[1], -1) for o in m.heads(x)]
    length = x.shape[1]
    alibi = (torch.arange(length)[None, None] * 0.1).expand(BATCH * HEADS, 1, length)
    s = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.3).view(
        BATCH, HEADS, length, length
    )
    s = s + torch.full((length, length), -1e9).triu(1)
    a = F.softmax(s, dim=-1)
    return x + m.merge(
        torch.bmm(a.view(BATCH * HEADS, length, length), v).view(BATCH, HEADS, length, -1)
    )


@FORWARDS.add
def causal_with_longer_keys(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    mem = m.emb(torch.arange(3)).view(1, 3, HEADS, -1).transpose(1, 2).expand(BATCH, -1, -1, -1)
    k = torch.cat([mem, k], 2)
    v = torch.cat([mem, v], 2)
    return x + m.merge(F.scaled_dot_product_attention(q, k, v))


@FORWARDS.add
def prefix_causal_sdpa(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    mem = m.emb(torch.arange(3)).view(1, 3, HEADS, -1).transpose(1, 2).expand(BATCH, -1, -1, -1)
    k = torch.cat([mem, k], 2)
    v = torch.cat([mem, v], 2)
    return x + m.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@FORWARDS.add
def talking_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = q @ k.mT
    mix = m.w1[:HEADS, :HEADS]
    s = (s.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2)
    return x + m.merge(s.softmax(-1) @ v)


@FORWARDS.add
def attn_sinks(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    s = q @ k.mT * 0.3 + torch.full((length, length), -math.inf).triu(1)
    sinks = m.extra[:HEADS].reshape(1, -1, 1, 1).expand(BATCH, -1, length, -1)
    s = torch.cat([s, sinks], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    p = F.softmax(s, dim=-1)[..., :-1]
    return x + m.merge(p @ v)


@FORWARDS.add
def soft_cap(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    length = x.shape[1]
    s = torch.tanh(q @ k.mT / 5) * 5 + torch.full((length, length), -math.inf).triu(1)
    return x + m.merge(s.softmax(-1) @ v)


@FORWARDS.add
def checkpointed(m: Any, x: Tensor) -> Tensor:
    def f(y):
        return m.merge(F.scaled_dot_product_attention(*m.heads(m.norm(y)), is_causal=True))

    return x + checkpoint(f, x, use_reentrant=False)


@FORWARDS.add
def triu_scores(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = (q @ k.mT).tril()
    return x + m.merge(s @ v * 0.1)


@FORWARDS.add
def cross_cov_attention(m: Any, x: Tensor) -> Tensor:  # XCiT
    q, k, v = [o.transpose(-1, -2) for o in m.heads(x)]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    a = (q @ k.transpose(-1, -2)).softmax(-1)
    return x + m.out((a @ v).permute(0, 3, 1, 2).reshape(BATCH, x.shape[1], WIDTH))


@FORWARDS.add
def cat_sink_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = q @ k.mT
    s = torch.cat(
        [s, m.extra[:HEADS].view(1, -1, 1, 1).expand(BATCH, -1, x.shape[1], 1)], -1
    ).softmax(-1)[..., :-1]
    return x + m.merge(s @ v)


@FORWARDS.add
def einsum_ellipsis(m: Any, x: Tensor) -> Tensor:
    return x + torch.einsum("...e,ef->...f", x, m.w1) + torch.einsum("...s e -> ...s", x)[..., None]


@FORWARDS.add
def einsum_cross(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(BATCH, x.shape[1], 3, HEADS, -1).unbind(2)
    a = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    b = m.bias[:, : x.shape[1], : x.shape[1]]
    return x + m.out(torch.einsum("bhqk,hqk,bkhd->bqhd", a, b, v).reshape(BATCH, x.shape[1], WIDTH))


@FORWARDS.add
def einsum_linear(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(BATCH, x.shape[1], 3, HEADS, -1).unbind(2)
    kv = torch.einsum("bshd,bshe->bhde", k.softmax(1), v)
    return x + m.out(
        torch.einsum("bshd,bhde->bshe", q.softmax(-1), kv).reshape(BATCH, x.shape[1], WIDTH)
    )


@FORWARDS.add
def einsum_bias_pos(m: Any, x: Tensor) -> Tensor:
    return x + torch.einsum("bse,st->bte", x, m.bias[0, : x.shape[1], : x.shape[1]])


@FORWARDS.add
def einsum_pos_weights(m: Any, x: Tensor) -> Tensor:
    return x + torch.einsum("bse,se->bse", x, m.emb(torch.arange(x.shape[1])))


@FORWARDS.add
def triu_rows(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = (q @ k.mT).triu(-2).tril(3)
    return x + m.merge(s @ v * 0.1)


@FORWARDS.add
def baddbmm_bias(m: Any, x: Tensor) -> Tensor:
    q, k, v = [o.reshape(BATCH * HEADS, x.shape[1], -1) for o in m.heads(x)]
    length = x.shape[1]
    bias = m.bias[:, :length, :length].repeat(BATCH, 1, 1)
    a = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.3).softmax(-1)
    return x + m.merge(torch.bmm(a, v).view(BATCH, HEADS, length, -1))
