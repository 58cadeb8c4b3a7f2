"""Forwards that look at one position at a time, in operations of many kinds.

Each is the forward of a block that has the layers of `Layers`, called with hidden states (B, S, E).
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.context_parallel.zoo.layers import BATCH, WIDTH, Forwards

FORWARDS = Forwards()


@FORWARDS.add
def mlp_einsum(m: Any, x: Tensor) -> Tensor:
    return (
        x + torch.einsum("bse,ef->bsf", x, m.w1) + torch.einsum("bse,e->bs", x, m.extra)[..., None]
    )


@FORWARDS.add
def roll_features(m: Any, x: Tensor) -> Tensor:
    return x + torch.roll(x, 1, dims=-1)


@FORWARDS.add
def logsumexp(m: Any, x: Tensor) -> Tensor:
    return x + torch.logsumexp(x, -1, keepdim=True)


@FORWARDS.add
def prelu(m: Any, x: Tensor) -> Tensor:
    return m.prelu(m.up(x)) @ m.down.weight.T


@FORWARDS.add
def std_norm(m: Any, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * m.extra


@FORWARDS.add
def var_norm(m: Any, x: Tensor) -> Tensor:
    return (
        (x - x.mean(-1, True))
        * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        * m.extra
    )


@FORWARDS.add
def normalize(m: Any, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * m.extra + x


@FORWARDS.add
def linalg_norm(m: Any, x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


@FORWARDS.add
def norm_method(m: Any, x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1)


@FORWARDS.add
def glu(m: Any, x: Tensor) -> Tensor:
    return x + F.glu(m.up(x), dim=-1)


@FORWARDS.add
def swiglu_split(m: Any, x: Tensor) -> Tensor:
    a, b = m.up(x).split(WIDTH, -1)
    return x + F.silu(a) * b


@FORWARDS.add
def tensor_split(m: Any, x: Tensor) -> Tensor:
    a, b = torch.tensor_split(m.up(x), 2, dim=-1)
    return x + a * b.sigmoid()


@FORWARDS.add
def positions_embedded(m: Any, x: Tensor) -> Tensor:
    return x + m.emb(torch.arange(x.shape[1])) + m.emb(torch.arange(x.size(1)))[None]


@FORWARDS.add
def gating_by_position(m: Any, x: Tensor) -> Tensor:
    pos = torch.linspace(0, 1, x.shape[1]).view(1, -1, 1)
    return x * (1 - pos) + m.out(x) * pos


@FORWARDS.add
def setitem_mask(m: Any, x: Tensor) -> Tensor:
    y = m.out(x)
    mask = torch.arange(x.shape[1]) % 3 == 0
    y = y.masked_fill(mask[None, :, None], 0.0)
    return x + y


@FORWARDS.add
def inplace_add(m: Any, x: Tensor) -> Tensor:
    y = m.out(x)
    y += x
    y.mul_(0.5)
    return y


@FORWARDS.add
def new_zeros(m: Any, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y = y + m.out(x)
    return x + y


@FORWARDS.add
def topk_features(m: Any, x: Tensor) -> Tensor:
    v, i = x.topk(3, dim=-1)
    return x + torch.zeros_like(x).scatter(-1, i, v)


@FORWARDS.add
def gather_features(m: Any, x: Tensor) -> Tensor:
    return x + torch.gather(x, -1, torch.arange(WIDTH).flip(0).expand(BATCH, x.shape[1], WIDTH))


@FORWARDS.add
def moe_dense(m: Any, x: Tensor) -> Tensor:
    g = (x @ m.w1[:, :4]).softmax(-1)
    y = torch.stack([m.down(F.gelu(m.up(x)) * (i + 1)) for i in range(4)], -1)
    return x + (y * g.unsqueeze(-2)).sum(-1)


@FORWARDS.add
def merge_batch(m: Any, x: Tensor) -> Tensor:
    y = x.reshape(-1, WIDTH)
    return x + m.down(F.gelu(m.up(y))).reshape(BATCH, -1, WIDTH)


@FORWARDS.add
def merge_batch_pos(m: Any, x: Tensor) -> Tensor:
    y = x.reshape(-1, WIDTH)
    y = y * torch.arange(y.shape[0]).unsqueeze(1) * 0.01
    return x + y.view(x.shape)


@FORWARDS.add
def custom_function(m: Any, x: Tensor) -> Tensor:
    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * a

        @staticmethod
        def backward(ctx, g):
            return g * 2 * ctx.saved_tensors[0]

    return x + Sq.apply(m.out(x))


@FORWARDS.add
def shared_value_from_mean(m: Any, x: Tensor) -> Tensor:
    s = x.mean((1, 2), keepdim=True)  # full scalar per sample, from gathered
    return x * s + m.out(x)


@FORWARDS.add
def param_scaled(m: Any, x: Tensor) -> Tensor:
    return x * m.logit_scale.exp() + (m.w1 @ m.w1).sum() * x


@FORWARDS.add
def param_long_chain(m: Any, x: Tensor) -> Tensor:
    w = m.w1
    for _ in range(12):
        w = torch.tanh(w + 0.1)
    return x @ w


@FORWARDS.add
def param_spectral(m: Any, x: Tensor) -> Tensor:
    w = m.w1 / torch.linalg.matrix_norm(m.w1, 2)
    return x @ w + F.linear(x, w)


@FORWARDS.add
def loss_inside(m: Any, x: Tensor) -> Tensor:
    m.aux = (m.out(x) ** 2).mean()
    return x + m.aux


@FORWARDS.add
def where_positions(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    cond = (torch.arange(length) < length // 2).view(1, length, 1)
    return torch.where(cond, x, m.out(x))


@FORWARDS.add
def lerp(m: Any, x: Tensor) -> Tensor:
    return torch.lerp(x, m.out(x), 0.3)


@FORWARDS.add
def addcmul(m: Any, x: Tensor) -> Tensor:
    return torch.addcmul(x, m.out(x), m.extra, value=0.5)


@FORWARDS.add
def argmax_mean(m: Any, x: Tensor) -> Tensor:
    return x * (x.argmax(-1) == 3).to(x.dtype).mean() + m.out(x)


@FORWARDS.add
def sort_features(m: Any, x: Tensor) -> Tensor:
    return x + x.sort(-1).values * m.extra


@FORWARDS.add
def cat_features(m: Any, x: Tensor) -> Tensor:
    return x + m.down(torch.cat([x, m.emb(torch.arange(x.shape[1])).expand_as(x)], -1))


@FORWARDS.add
def stack_mix(m: Any, x: Tensor) -> Tensor:
    return torch.stack([x, m.out(x), torch.zeros_like(x)], 1).sum(1)


@FORWARDS.add
def stack_dim2(m: Any, x: Tensor) -> Tensor:
    return torch.stack([x, m.out(x)], 2).mean(2)


@FORWARDS.add
def pointwise_conv(m: Any, x: Tensor) -> Tensor:
    y = F.conv1d(x.transpose(1, 2), m.w1.unsqueeze(-1), m.extra)
    return x + y.transpose(1, 2)


@FORWARDS.add
def pad_features(m: Any, x: Tensor) -> Tensor:
    return x + F.pad(x, (1, 0))[..., :-1]


@FORWARDS.add
def topk_gate(m: Any, x: Tensor) -> Tensor:
    g = x @ m.w1[:, :4]
    v, i = g.topk(2, -1)
    gate = torch.full_like(g, -1e9).scatter(-1, i, v).softmax(-1)
    y = torch.stack([m.down(F.gelu(m.up(x)) * (j + 1)) for j in range(4)], -1)
    return x + (y * gate.unsqueeze(-2)).sum(-1)


@FORWARDS.add
def gather_two(m: Any, x: Tensor) -> Tensor:
    i = x.argsort(-1)[..., :5]
    return (
        x
        + torch.gather(m.out(x), -1, i).sum(-1, keepdim=True)
        + torch.take_along_dim(x, i, dim=-1).mean(-1, keepdim=True)
    )


@FORWARDS.add
def mse_inside(m: Any, x: Tensor) -> Tensor:
    m.aux = F.mse_loss(m.out(x), x) + F.smooth_l1_loss(x, torch.zeros_like(x))
    return x


@FORWARDS.add
def norms_many(m: Any, x: Tensor) -> Tensor:
    return x / (
        x.norm(2, -1, keepdim=True)
        + torch.linalg.norm(x, dim=-1, keepdim=True)
        + torch.linalg.vector_norm(x, 2, -1, True)
    )


@FORWARDS.add
def view_as_heads(m: Any, x: Tensor) -> Tensor:
    y = x.reshape(BATCH * x.shape[1], WIDTH)
    return m.out(y).view_as(x) + m.out(y).reshape_as(x)


@FORWARDS.add
def rand_noise(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.randn_like(x) * m.extra + torch.rand(x.shape)


@FORWARDS.add
def var_mean_unpack(m: Any, x: Tensor) -> Tensor:
    v, mu = torch.var_mean(x, dim=-1, keepdim=True)
    return (x - mu) / (v + 1e-5).sqrt()
