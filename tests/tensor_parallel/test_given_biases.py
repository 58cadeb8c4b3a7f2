"""Attentions that are called with more than a trial knows to give them."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.tensor_parallel.automatic import automatic_plan
from tests.tensor_parallel.test_split import compare

WIDTH, HEADS, LENGTH = 16, 4, 5


class Attention(nn.Module):
    """Adds what it is given to the scores of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-2, -1)
        scores = scores if mask is None else scores + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class Relative(Attention):
    """Works with positions when it is given them, by a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.position_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            return super().forward(x)
        heads = self.position_proj(positions).view(LENGTH, HEADS, -1).sum(-1)
        return super().forward(x, heads.T[None, :, None])


class Model(nn.Module):
    """Makes the biases of all heads for two attentions."""

    def __init__(self, attention: type[Attention], num_columns: int) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, num_columns)
        self.attentions = nn.ModuleList(attention() for _ in range(2))
        self.sure = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = self.table.weight
        if not isinstance(self.attentions[0], Relative):
            given = given.T[None, :, None, :]  # (1, heads, 1, T)
        for attention in self.attentions:
            x = x + attention(x, given)
        return self.sure(x)


def made(attention: type[Attention], num_columns: int) -> nn.Module:
    torch.manual_seed(0)
    return Model(attention, num_columns).double()


def styles(model: nn.Module) -> dict[str, Any]:
    return {layer.name: layer.style for layer in automatic_plan(model, 2)}


def loss_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.double, generator=generator)
    return model(x).square().sum()


def test_a_bias_of_all_heads_fits_an_attention_that_is_told_of_fewer() -> None:
    """A bias of all heads met an attention that was told of fewer."""
    plan = styles(made(Attention, HEADS))
    assert plan["attentions.0.q_proj"].lazy_output
    compare(lambda: made(Attention, HEADS), plan, loss_of, 2)


def test_an_attention_that_is_given_no_biases_is_told_of_its_heads() -> None:
    plan = styles(nn.ModuleDict({"attention": Attention()}))
    assert not plan["attention.q_proj"].full_output


def test_what_a_trial_cannot_reach_is_not_taken_to_be_right() -> None:
    """What a trial could not reach was taken to be right."""
    model = made(Relative, WIDTH)
    plan = styles(model)
    assert not any(name.startswith("attentions") for name in plan)
    compare(lambda: made(Relative, WIDTH), plan, loss_of, 2)


class Latent(nn.Module):
    """Keys of each head beside features that all heads use as they are (DeepSeek's)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, 4
        self.q_proj = nn.Linear(WIDTH, HEADS * 6)
        self.down, self.norm = nn.Linear(WIDTH, 8 + 2), nn.LayerNorm(8)
        self.up, self.out = nn.Linear(8, HEADS * 4), nn.Linear(HEADS * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.down(x).split([8, 2], -1)
        keys = self.up(self.norm(latent)).view(*x.shape[:2], -1, 4).transpose(1, 2)
        q = self.q_proj(x).view(*x.shape[:2], -1, 6).transpose(1, 2)
        shared = shared.unsqueeze(1).expand(-1, keys.shape[1], -1, -1)
        scores = q @ torch.cat([keys, shared], -1).transpose(-2, -1)
        return self.out((scores.softmax(-1) @ keys).transpose(1, 2).flatten(2))


def test_features_that_all_heads_share_have_the_gradient_of_all() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Latent().double()

    plan = {"q_proj": "colwise", "down": "shared_tail(2)", "up": "colwise", "out": "rowwise"}
    compare(make, plan, loss_of, 2)
