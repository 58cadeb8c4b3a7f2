"""Small models with mixtures of experts, of Hugging Face and written by hand.

mixtral, qwen3_moe, deepseek_v3, deepseek_v2, gpt_oss     experts in tensors
listed      experts in lists, the best two for each word, and a shared one
attending   the same after attention, in blocks of a class of their own
seldom      experts in lists, used on all ranks, on one, now and then, and never
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.strategies.models import HuggingFaceLM, Trained, _config, _text
from tests.strategies.models import mixtral as mixtral_of

_VOCABULARY = 29


def mixtral(num_layers: int = 2) -> HuggingFaceLM:
    """Four experts, of which each word uses two."""
    return mixtral_of(num_layers)


def qwen3_moe(num_layers: int = 2) -> HuggingFaceLM:
    """Eight experts, of which each word uses two."""
    from transformers import Qwen3MoeForCausalLM

    sizes = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "norm_topk_prob": True}
    return HuggingFaceLM(Qwen3MoeForCausalLM(_config("qwen3_moe", num_layers, **sizes, **experts)))


def deepseek_v3(num_layers: int = 3) -> HuggingFaceLM:
    """Eight experts in two groups, a shared one, a router's bias in a buffer; one plain layer."""
    from transformers import DeepseekV3ForCausalLM

    return HuggingFaceLM(
        DeepseekV3ForCausalLM(_config("deepseek_v3", num_layers, **_deepseek(), n_group=2))
    )


def _deepseek() -> dict[str, Any]:
    return {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_shared_experts": 1,
    }


def gpt_oss(num_layers: int = 2) -> HuggingFaceLM:
    """Four experts with biases, weights transposed."""
    from transformers import GptOssForCausalLM

    sizes = {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    config = _config("gpt_oss", num_layers, **sizes, **experts)
    config._attn_implementation = "eager"
    return HuggingFaceLM(GptOssForCausalLM(config))


class Expert(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ListedMixture(nn.Module):
    """The best two of several experts for each word, and one for all; skips who has no word."""

    def __init__(self, width: int, num_experts: int, num_best: int = 2) -> None:
        super().__init__()
        self.num_best = num_best
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))
        self.shared = Expert(width)

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        weights, chosen = self.router(words).softmax(-1).topk(self.num_best)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            at, place = torch.where(chosen == number)
            if len(at):
                added = expert(words[at]) * weights[at, place, None]
                result.index_add_(0, at, added.to(result.dtype))
        return (result + self.shared(words)).view_as(x)


class Listed(Trained):
    """Words in, the next ones out, through two residual mixtures."""

    def __init__(self, width: int = 16, num_experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), ListedMixture(width, num_experts)) for _ in range(2)
        )
        self.head = nn.Linear(width, _VOCABULARY)

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch
        x = self.embedding(text)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        return TensorDataset(*_text(num_samples, _VOCABULARY))


class AttendingBlock(nn.Module):
    """Causal attention of four heads, then a mixture."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = ListedMixture(width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).chunk(3, -1)
        heads = [one.unflatten(-1, (4, -1)).transpose(1, 2) for one in qkv]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm(x))


class Attending(Listed):
    """Words in, the next ones out, through two blocks."""

    def __init__(self, width: int = 16, num_experts: int = 4) -> None:
        super().__init__(width, num_experts)
        self.blocks = nn.ModuleList(AttendingBlock(width, num_experts) for _ in range(2))

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


class SeldomMixture(nn.Module):
    """Adds to each sample what its expert makes of it, as told; leaves other experts alone."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        weights = self.router(x).sigmoid()
        added = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            if len(chosen):
                added = added.index_add(
                    0, chosen, torch.tanh(expert(x[chosen])) * weights[chosen, number, None]
                )
        return x + added


class Seldom(Trained):
    """Experts by sample: two for most, one on a single rank, one now and then, others never."""

    def __init__(self, width: int = 16, num_experts: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.blocks = nn.ModuleList(SeldomMixture(width, num_experts) for _ in range(2))
        self.outlet = nn.Linear(width, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, route, target = batch
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, route)
        return F.mse_loss(self.outlet(x), target)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(2)
        x, target = (torch.randn(num_samples, width, generator=generator) for width in (8, 1))
        index = torch.arange(num_samples)
        route = torch.full((num_samples,), 9)  # no expert
        route[index % 2 == 0] = 0  # not on rank 1 of 2
        route[index % 12 == 1] = 5
        route[index % 60 == 14] = 6
        return TensorDataset(x, route, target)


EXPERT_MODELS: dict[str, Callable[[], Trained]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "listed": Listed,
    "attending": Attending,
    "seldom": Seldom,
}
