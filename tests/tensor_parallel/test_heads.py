"""Counts of heads follow the split of the projections, and a refused plan changes nothing."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.tensor_parallel.test_split import GPT_PLAN, compare, small_gpt


class Attention(nn.Module):
    """Says how wide a head is; four of queries, two of keys and of values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_groups = 4, 4, 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 4 * heads) for heads in (4, 2, 2))


PLAN = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise"}


def attention() -> nn.Module:
    return nn.ModuleDict({"attention": Attention()})


def counts(model: nn.Module) -> tuple[int, int]:
    own = model.get_submodule("attention").__dict__
    return own["num_heads"], own["num_key_value_groups"]


@pytest.mark.parametrize(
    ("keys", "num_ranks", "expected"), [("colwise", 2, (2, 2)), ("shared_heads(2)", 4, (1, 1))]
)
def test_each_rank_counts_its_own(keys: str, num_ranks: int, expected: tuple[int, int]) -> None:
    def fn(rank: int) -> None:
        model = attention()
        plan = PLAN | {"*.k_proj": keys, "*.v_proj": keys}
        split = SplitModel(model, match_plan(model, plan), all_ranks())
        assert counts(model) == expected
        split.restore()
        assert counts(model) == (4, 2)

    run_ranks(fn, num_ranks)


def test_a_projection_that_would_be_cut_within_a_head_is_refused() -> None:
    """Its features have a size that may fold all the same, into heads that are none."""

    def fn(rank: int) -> None:
        model = attention()
        with pytest.raises(
            ConfigError,
            match=r"k_proj has 2 heads of 4, which 4 .* of 1, 2, or, .*shared_heads\(2\)",
        ):
            SplitModel(model, match_plan(model, PLAN), all_ranks())

    run_ranks(fn, 4)


@pytest.mark.parametrize("refused", ["head", "heads"])
def test_a_refused_plan_leaves_the_model_as_it_was(refused: str) -> None:
    """Its first layers were cut already when a later one was refused."""

    def fn(rank: int) -> None:
        model = small_gpt()
        plan = GPT_PLAN | ({"head": "packed_colwise(5)"} if refused == "head" else {})
        if refused == "heads":
            model.blocks[1].num_heads = 3
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match=r"multiple of 5|num_heads is 3"):
            SplitModel(model, match_plan(model, plan), all_ranks())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert model.blocks[0].num_heads == 4
        assert not any("tensor_parallel" in key for m in model.modules() for key in m.__dict__)

    run_ranks(fn, 2)


def test_the_count_is_left_alone_when_only_a_pair_is_split() -> None:
    """A plan for the feed-forward layers alone halved the heads of the block's attention."""
    text = torch.arange(24).view(3, 8) * 9 % 256
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    compare(small_gpt, plan, lambda model: model.loss([text, text.roll(1)]), 2)


WIDTH, HEADS, LENGTH, PREFIX = 16, 4, 5, 3
HEAD = WIDTH // HEADS
Put = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def beside(past: Any, keys: Tensor, values: Tensor, dim: int = -2) -> tuple[Tensor, Tensor]:
    return torch.cat([past[0], keys], dim=dim), torch.cat([past[1], values], dim=dim)


def grown(past: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Put the keys into the container, as caches do."""
    held = past if isinstance(past, (list, dict)) else vars(past)
    names = (0, 1) if isinstance(past, list) else ("keys", "values")
    held[names[0]] = torch.cat([held[names[0]], keys], dim=-2)
    held[names[1]] = torch.cat([held[names[1]], values], dim=-2)
    return held[names[0]], held[names[1]]


def taken(past: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Take what is there out of the container, of which nothing is left."""
    names = (1, 0) if isinstance(past, list) else ("values", "keys")
    given = [past.pop(name) for name in names]
    return beside(given[::-1], keys, values)


class CachingAttention(nn.Module):
    def __init__(self, num_key_heads: int, put: Put) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, num_key_heads, HEAD
        self.num_key_value_groups = HEADS // num_key_heads
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, num_key_heads * HEAD) for _ in range(2))
        self.put = put

    def forward(self, x: Tensor, past: Any = None) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past is not None:
            k, v = self.put(past, k, v)
        k, v = (one.repeat_interleave(self.num_key_value_groups, dim=1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Prefixed(nn.Module):
    """Gives its attentions learned keys and values."""

    def __init__(self, num_key_heads: int, put: Put, hold: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(CachingAttention(num_key_heads, put) for _ in range(2))
        self.prefix = nn.Parameter(torch.randn(2, 2, num_key_heads, PREFIX, HEAD))
        self.hold = hold

    def forward(self, x: Tensor) -> Tensor:
        for attention, prefix in zip(self.attentions, self.prefix, strict=True):
            keys, values = prefix.unsqueeze(1).expand(-1, len(x), -1, -1, -1)
            x = x + attention(x, self.hold(keys, values))
        return x


def as_positions_first(keys: Tensor, values: Tensor) -> Any:
    return keys.transpose(1, 2), values.transpose(1, 2)


def from_positions_first(past: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    both = (keys.transpose(1, 2), values.transpose(1, 2))
    keys, values = beside(past, *both, dim=1)
    return keys.transpose(1, 2), values.transpose(1, 2)


CONTAINERS: dict[str, tuple[Put, Callable[[Tensor, Tensor], Any]]] = {
    "tuple": (beside, lambda *both: both),
    "list": (grown, lambda *both: [*both]),
    "dict": (grown, lambda keys, values: {"keys": keys, "values": values}),
    "object": (grown, lambda keys, values: SimpleNamespace(keys=keys, values=values)),
    "positions first": (from_positions_first, as_positions_first),
}
CACHING_PLAN = {
    "attentions.*.q_proj": "colwise",
    "attentions.*.k_proj": "colwise",
    "attentions.*.v_proj": "colwise",
    "attentions.*.o_proj": "rowwise",
}


def loss_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return model(x).square().sum()


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(("num_key_heads", "num_ranks"), [(4, 2), (2, 2), (1, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("container", CONTAINERS)
def test_learned_keys_of_all_heads(container: str, num_key_heads: int, num_ranks: int) -> None:
    """They met the keys of a rank's heads: "Expected size 4 but got size 2"."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Prefixed(num_key_heads, *CONTAINERS[container]).double()

    shared = (
        {}
        if num_key_heads % num_ranks == 0
        else {f"attentions.*.{one}_proj": f"shared_heads({num_key_heads})" for one in "kv"}
    )
    compare(make, CACHING_PLAN | shared, loss_of, num_ranks)


class Chunked(Prefixed):
    """Attends in two parts, of which the second sees what the first has left."""

    def forward(self, x: Tensor) -> Tensor:
        past = self.hold(*self.prefix[0].unsqueeze(1).expand(-1, len(x), -1, -1, -1))
        first, second = x.chunk(2, dim=1)
        return torch.cat([self.attentions[0](one, past) for one in (first, second)], dim=1)


@pytest.mark.parametrize("container", ["list", "dict"])
def test_an_attention_may_take_what_it_is_given_out_of_its_container(container: str) -> None:
    """What had been given was looked for where it was no more: IndexError and KeyError."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Prefixed(HEADS, taken, CONTAINERS[container][1]).double()

    compare(make, CACHING_PLAN, loss_of, num_ranks=2)


@pytest.mark.parametrize("num_key_heads", [1, 2])
def test_keys_that_an_attention_has_left_are_its_own(num_key_heads: int) -> None:
    """Those of one head for all ranks look like a prefix's, and must not be summed once more."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Chunked(num_key_heads, *CONTAINERS["list"]).double()
        del model.attentions[1]
        return model

    shared = {f"attentions.*.{one}_proj": "shared_heads(1)" for one in "kv"}
    compare(make, CACHING_PLAN | (shared if num_key_heads == 1 else {}), loss_of, 2)


def test_what_user_code_keeps_is_given_back() -> None:
    """A list that is given in each step has the learned tensors after it, and an error too."""
    kept = [torch.randn(3, HEADS, PREFIX, HEAD, requires_grad=True) for _ in range(2)]

    def fn(rank: int) -> None:
        torch.manual_seed(0)
        model = Prefixed(HEADS, beside, lambda *_: own)
        own = [*kept]
        SplitModel(model, match_plan(model, CACHING_PLAN), all_ranks())
        model(torch.randn(3, LENGTH, WIDTH))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, LENGTH, 1))
        assert [one is other for one, other in zip(own, kept, strict=True)] == [True, True]
        copied = copy.deepcopy(model)
        assert copied(torch.randn(3, LENGTH, WIDTH)).shape == (3, LENGTH, WIDTH)

    run_ranks(fn, 2)


class Tuned(nn.Module):
    """A decoder of Hugging Face's that is given a learned prefix, as prefix tuning does."""

    def __init__(self, decoder: nn.Module, num_key_heads: int, *, of_two_kinds: bool) -> None:
        super().__init__()
        self.decoder, self.of_two_kinds = decoder, of_two_kinds
        self.prefix = nn.Parameter(torch.randn(2, 2, num_key_heads, PREFIX, HEAD))

    def cache(self, num_rows: int) -> Any:
        rows = self.prefix.unsqueeze(2).expand(-1, -1, num_rows, -1, -1, -1)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(rows):
            cache.update(keys, values, index)
        return EncoderDecoderCache(cache, DynamicCache()) if self.of_two_kinds else cache

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(len(ids), PREFIX + ids.shape[1], dtype=torch.int64)
        given = {"past_key_values": self.cache(len(ids)), "attention_mask": mask}
        logits: Tensor = self.decoder(ids, **given).logits
        return logits


def llama(num_key_heads: int) -> Tuned:
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=num_key_heads,
    )
    return Tuned(LlamaForCausalLM(config), num_key_heads, of_two_kinds=False)


def gpt2(num_key_heads: int) -> Tuned:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=24, n_embd=WIDTH, n_head=HEADS, n_layer=2, **dropout)
    return Tuned(GPT2LMHeadModel(config), num_key_heads, of_two_kinds=True)


TUNED: Sequence[tuple[Callable[[int], Tuned], int, int]] = [
    (llama, 4, 2),
    (llama, 2, 2),
    (llama, 1, 2),
    (gpt2, 4, 2),
]


def of_tokens(model: nn.Module) -> Tensor:
    logits: Tensor = model(torch.arange(15).view(3, 5) % 24)
    return logits.square().mean() + logits[..., 3].mean()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("decoder", "num_key_heads", "num_ranks"), TUNED)
def test_prefix_tuning_of_decoders(
    decoder: Callable[[int], Tuned], num_key_heads: int, num_ranks: int
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return decoder(num_key_heads).double()

    plan: dict[str, Any] = {layer.name: layer.style for layer in automatic_plan(make(), num_ranks)}
    assert any("attn" in name for name in plan)
    compare(make, plan, of_tokens, num_ranks)
