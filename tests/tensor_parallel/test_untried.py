"""What plans make of layers that cannot be tried out, or whose weight is no parameter."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.tensor_parallel.test_automatic import HEADS, HIDDEN, WIDTH, Net, blocks


class Sloped(nn.Module):
    """An attention with ALiBi's slopes, by the number of heads; a trial cannot call it."""

    def __init__(self, *, sloped: bool) -> None:
        super().__init__()
        self.num_heads, self.sloped = HEADS, sloped
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, settings: dict[str, float]) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = query @ key.transpose(-2, -1) * settings["scale"]
        if self.sloped:
            slopes = 2.0 ** -torch.arange(1, self.num_heads + 1).view(-1, 1, 1)
            scores = scores - slopes * torch.arange(x.shape[1])
        return self.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Around(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, {"scale": 0.5})


def test_an_attention_that_nobody_can_try_out_is_not_believed_by_its_names() -> None:
    """Its slopes were those of the rank's heads, as if they were all: another loss, no error."""
    assert blocks(Sloped(sloped=True)) == {}


def test_what_cannot_be_tried_out_by_itself_is_with_the_module_around_it() -> None:
    assert blocks(Around(Sloped(sloped=True))) == {
        **{f"attention.{one}_proj": "colwise_parted" for one in "qkv"},  # all slopes are right
        "attention.out_proj": "rowwise_split_input",
    }
    assert blocks(Around(Sloped(sloped=False))) == {
        **{f"attention.{one}_proj": "colwise" for one in "qkv"},
        "attention.out_proj": "rowwise",
    }


def test_layers_whose_weights_are_used_without_them_are_not_believed_by_their_names() -> None:
    """Layers whose weights are used without them were believed by their names."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.linear(x, F.normalize(self.up.weight, dim=-1))
            return F.linear(F.relu(hidden), self.down.weight)

    assert blocks(Normed()) == {}


class Pair(nn.Module):
    def __init__(self, attention: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.table = nn.Embedding(HIDDEN, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_parametrized_weight_is_left_out_of_the_automatic_plan(norm: type) -> None:
    """A parametrized weight broke the automatic plan."""
    model = Net(Pair())
    for layer in (model.block.up, model.block.table, model.block.attention.out_proj):
        norm(layer)
    planned = {layer.name for layer in automatic_plan(model, 2)}
    assert planned == {"sure.0", "sure.2"}


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("up", "colwise"),
        ("up", "rowwise"),
        ("up", "shared_heads(1)"),
        ("table", "embedding_rowwise"),
        ("attention", "attention"),
    ],
)
def test_a_parametrized_weight_is_refused_in_a_given_plan(name: str, style: str) -> None:
    model = Pair()
    for layer in (model.up, model.table, model.attention.out_proj):
        weight_norm(layer)
    with pytest.raises(ConfigError, match=f"splits '{name}' .* expected"):
        match_plan(model, {name: style})


@pytest.mark.parametrize("named", ["words", "logits"])
def test_a_tied_weight_of_which_one_layer_is_left_full_is_refused(named: str) -> None:
    """The one that was left full failed in the first step: an index out of range."""

    def fn(rank: int) -> None:
        model = nn.ModuleDict({"words": nn.Embedding(8, 4), "logits": nn.Linear(4, 8, bias=False)})
        model["logits"].weight = model["words"].weight
        style = {"words": "embedding_rowwise", "logits": "colwise_gather_output"}[named]
        with pytest.raises(ConfigError, match="cuts a weight that it shares with another layer"):
            SplitModel(model, match_plan(model, {named: style}), all_ranks())

    run_ranks(fn, 2)


def test_more_ranks_than_heads_of_a_named_torch_attention_are_refused() -> None:
    def fn(rank: int) -> None:
        model = nn.ModuleDict({"mix": nn.MultiheadAttention(16, 4)})
        with pytest.raises(ConfigError, match=r"mix has 4 heads, which 8 ranks .* 1, 2, 4"):
            SplitModel(model, match_plan(model, {"mix": "attention"}), all_ranks())

    run_ranks(fn, 8)
