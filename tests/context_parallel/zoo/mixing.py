"""Forwards that mix positions otherwise than by attention, or look at some of them.

Each is the forward of a block that has the layers of `Layers`, called with hidden states (B, S, E).
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.context_parallel.zoo.layers import BATCH, WIDTH, Forwards

FORWARDS = Forwards()


@FORWARDS.add
def mlp_mixer(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    w = m.bias[0, :length, :length]
    return x + F.gelu(x.transpose(1, 2) @ w).transpose(1, 2)


@FORWARDS.add
def mixer_linear(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    return x + F.linear(x.transpose(1, 2), m.bias[1, :length, :length]).transpose(1, 2)


@FORWARDS.add
def left_matmul(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    return x + m.bias[1, :length, :length] @ x


@FORWARDS.add
def fft_mix(m: Any, x: Tensor) -> Tensor:
    return x + torch.fft.fft2(x, dim=(-2, -1)).real * 0.1


@FORWARDS.add
def cumsum(m: Any, x: Tensor) -> Tensor:
    return x + torch.cumsum(x, 1) / 10


@FORWARDS.add
def cummean(m: Any, x: Tensor) -> Tensor:
    c = x.cumsum(dim=1)
    n = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
    return x + m.out(c / n)


@FORWARDS.add
def shift_pad(m: Any, x: Tensor) -> Tensor:
    return x + m.extra * F.pad(x, (0, 0, 1, 0))[:, :-1]


@FORWARDS.add
def shift_roll(m: Any, x: Tensor) -> Tensor:
    return x + torch.roll(x, 1, dims=1)


@FORWARDS.add
def shift_cat(m: Any, x: Tensor) -> Tensor:
    return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


@FORWARDS.add
def time_mix_rwkv(m: Any, x: Tensor) -> Tensor:
    prev = F.pad(x, (0, 0, 1, -1))
    return x + m.out(x * m.extra + prev * (1 - m.extra))


@FORWARDS.add
def conv(m: Any, x: Tensor) -> Tensor:
    return x + m.conv(x.transpose(1, 2)).transpose(1, 2)


@FORWARDS.add
def pool_mean(m: Any, x: Tensor) -> Tensor:
    return x + m.out(x.mean(1, keepdim=True))


@FORWARDS.add
def pool_max(m: Any, x: Tensor) -> Tensor:
    return x + x.amax(1, keepdim=True)


@FORWARDS.add
def avgpool(m: Any, x: Tensor) -> Tensor:
    return x + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


@FORWARDS.add
def softmax_seq(m: Any, x: Tensor) -> Tensor:
    return x + (x.softmax(1) * x)


@FORWARDS.add
def instance_norm_seq(m: Any, x: Tensor) -> Tensor:
    return x + F.instance_norm(x.transpose(1, 2)).transpose(1, 2)


@FORWARDS.add
def groupnorm(m: Any, x: Tensor) -> Tensor:
    return x + m.gn(x.transpose(1, 2)).transpose(1, 2)


@FORWARDS.add
def batchnorm(m: Any, x: Tensor) -> Tensor:
    return x + m.bn(x.transpose(1, 2)).transpose(1, 2)


@FORWARDS.add
def batchnorm_flat(m: Any, x: Tensor) -> Tensor:
    return x + m.bn(x.reshape(-1, WIDTH)).view_as(x)


@FORWARDS.add
def first_token(m: Any, x: Tensor) -> Tensor:
    return x + m.out(x[:, 0:1])


@FORWARDS.add
def last_token(m: Any, x: Tensor) -> Tensor:
    return x + m.out(x[:, -1]).unsqueeze(1)


@FORWARDS.add
def setitem_first(m: Any, x: Tensor) -> Tensor:
    y = m.out(x).clone()
    y[:, 0] = y[:, 0] * 2
    return x + y


@FORWARDS.add
def index_put(m: Any, x: Tensor) -> Tensor:
    y = m.out(x).clone()
    y[:, torch.arange(0, x.shape[1], 2)] += 1.0
    return x + y


@FORWARDS.add
def bool_select(m: Any, x: Tensor) -> Tensor:
    keep = torch.arange(x.shape[1]) % 2 == 0
    y = torch.zeros_like(x)
    y[:, keep] = m.out(x[:, keep])
    return x + y


@FORWARDS.add
def reversed_seq(m: Any, x: Tensor) -> Tensor:
    return x + m.out(x.flip(1))


@FORWARDS.add
def local_window_unfold(m: Any, x: Tensor) -> Tensor:
    y = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
    return x + m.out(y.mean(-1))


@FORWARDS.add
def topk_seq(m: Any, x: Tensor) -> Tensor:
    s = x.mean(-1)
    val, idx = s.topk(4, dim=1)
    y = torch.gather(x, 1, idx.unsqueeze(-1).expand(-1, -1, WIDTH))
    return x.scatter_add(
        1, idx.unsqueeze(-1).expand(-1, -1, WIDTH), m.out(y) * val.sigmoid().unsqueeze(-1)
    )


@FORWARDS.add
def scan_loop(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(BATCH, WIDTH)
    out = []
    for t in range(x.shape[1]):
        h = torch.tanh(m.out(x[:, t]) + h * m.extra)
        out.append(h)
    return x + torch.stack(out, 1)


@FORWARDS.add
def ssm_chunk(m: Any, x: Tensor) -> Tensor:
    a = torch.sigmoid(x @ m.w1)
    lc = torch.log(a).cumsum(1)
    return x + torch.exp(lc) * 0.1


@FORWARDS.add
def dim_minus2_mean(m: Any, x: Tensor) -> Tensor:
    return x - x.mean(dim=-2, keepdim=True)


@FORWARDS.add
def seq_std(m: Any, x: Tensor) -> Tensor:
    return x / (x.std(dim=1, keepdim=True) + 1)


@FORWARDS.add
def swapaxes_view(m: Any, x: Tensor) -> Tensor:
    y = x.swapaxes(1, 2).contiguous().view(BATCH, WIDTH * x.shape[1])
    y = y.view(BATCH, WIDTH, x.shape[1]).swapaxes(1, 2)
    return m.out(y)


@FORWARDS.add
def squeeze_excite(m: Any, x: Tensor) -> Tensor:
    s = torch.sigmoid(m.out(F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1)))
    return x * s.unsqueeze(1)


@FORWARDS.add
def reshape_wrong_view(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    y = x.reshape(BATCH, length * 2, WIDTH // 2)
    return x + (y * torch.arange(length * 2).view(1, -1, 1) * 0.01).reshape(BATCH, length, WIDTH)


@FORWARDS.add
def flatten_all(m: Any, x: Tensor) -> Tensor:
    y = x.flatten(1) * torch.linspace(0, 1, x.shape[1] * WIDTH)
    return y.view_as(x) + m.out(x)


@FORWARDS.add
def masked_scatter(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = (torch.arange(length) < 2)[None, :, None].expand(BATCH, length, WIDTH)
    return x.masked_scatter(mask, m.emb(torch.arange(BATCH * 2)))


@FORWARDS.add
def outer_pairs(m: Any, x: Tensor) -> Tensor:
    p = x.unsqueeze(1) * x.unsqueeze(2)  # (BATCH,length,length,WIDTH)
    return x + p.mean(2)


@FORWARDS.add
def pair_diff(m: Any, x: Tensor) -> Tensor:
    d = (x[:, :, None] - x[:, None, :]).square().sum(-1)
    return x + m.out(torch.softmax(-d, -1) @ x)


@FORWARDS.add
def cdist(m: Any, x: Tensor) -> Tensor:
    return x + torch.softmax(-torch.cdist(x, x), -1) @ x


@FORWARDS.add
def index_add_tokens(m: Any, x: Tensor) -> Tensor:
    words = x.reshape(-1, WIDTH)
    out = torch.zeros_like(words)
    w, c = (words @ m.w1[:, :4]).softmax(-1).topk(2)
    for i in range(4):
        at, place = torch.where(c == i)
        if len(at):
            out.index_add_(0, at, m.out(words[at]) * (i + 1) * w[at, place, None])
    return x + out.view_as(x)


@FORWARDS.add
def zeros_like_fill(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., :4] = x[..., :4] * 2
    return y + m.out(x)


@FORWARDS.add
def out_buffer(m: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(m.out(x))
    return x + y


@FORWARDS.add
def max_features(m: Any, x: Tensor) -> Tensor:
    return (
        x
        + x.max(-1, keepdim=True)[0]
        + x.max(dim=-1).values.unsqueeze(-1)
        + x.max(dim=1).values.unsqueeze(1)
    )


@FORWARDS.add
def any_all(m: Any, x: Tensor) -> Tensor:
    return x * (x > 0).any(-1, keepdim=True) + m.out(x) * (x > -9).all()


@FORWARDS.add
def flip_norm(m: Any, x: Tensor) -> Tensor:
    return x.flip(-1) + x.roll(2, -1) + x.cumsum(-1) + x.cumprod(-1) + F.normalize(x, dim=1)
