"""Attentions that compute with the whole width are split; they compute what the full one does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    from_local,
    full_tensor,
)
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.strategies.models import SPLIT_MODELS
from tests.strategies.nanogpt import CausalSelfAttention
from tests.tensor_parallel.full_width import (
    Batched,
    Grouped,
    MinGPT,
    NormedQueries,
    Swin,
    Timm,
    Uncounted,
)
from tests.tensor_parallel.test_automatic import Net, blocks

WIDTH, HEADS = 16, 4
FUSED, ROWS = "packed_colwise_parted(3)", "rowwise_split_input"
OF_THREE = dict.fromkeys(("key", "query", "value"), "colwise_parted")

ATTENTIONS: dict[str, tuple[Callable[..., nn.Module], dict[str, str]]] = {
    "nanoGPT": (CausalSelfAttention, {"c_attn": FUSED, "c_proj": ROWS}),
    "nanoGPT without biases": (
        partial(CausalSelfAttention, bias=False),
        {"c_attn": FUSED, "c_proj": ROWS},
    ),
    "nanoGPT, step by step": (
        partial(CausalSelfAttention, flash=False),
        {"c_attn": FUSED, "c_proj": ROWS},
    ),
    "minGPT": (MinGPT, OF_THREE | {"proj": ROWS}),
    "timm": (Timm, {"qkv": FUSED, "proj": ROWS}),
    "timm by indices": (partial(Timm, indexed=True), {"qkv": FUSED, "proj": ROWS}),
    "Swin": (Swin, {"qkv": FUSED, "proj": ROWS}),
    "llama2.c": (
        lambda width, _: Grouped(2 * width, 8),
        dict.fromkeys(("wq", "wk", "wv"), "colwise_parted") | {"wo": ROWS},
    ),
    "fairseq": (Batched, {f"{one}_proj": "colwise_parted" for one in "qkv"} | {"out_proj": ROWS}),
}
TWICE = set(ATTENTIONS) - {"nanoGPT", "nanoGPT without biases", "llama2.c"}  # no fused kernel


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ATTENTIONS[name][0](WIDTH, HEADS).double()


def activation(model: nn.Module) -> Tensor:
    width = next(one for one in model.modules() if isinstance(one, nn.Linear)).in_features
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 6, width, dtype=torch.double, generator=generator)


def plan_of(model: nn.Module, num_ranks: int) -> dict[str, Any]:
    layers = automatic_plan(nn.ModuleDict({"attention": model}), num_ranks)
    return {layer.pattern.removeprefix("attention."): layer.style for layer in layers}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_of_the_full_one_width_is_split(name: str) -> None:
    assert blocks(made(name)) == ATTENTIONS[name][1]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_it_computes_the_same_and_gathers_no_activation(name: str, num_ranks: int) -> None:
    """Results and gradients; what is gathered at most is the gradient of a bias of each head."""
    full = made(name)
    inputs = activation(full).requires_grad_()
    expected = full(inputs)
    expected.square().sum().backward()

    def fn(rank: int) -> None:
        model, group, x = made(name), all_ranks(), activation(full).requires_grad_()
        split = SplitModel(model, match_plan(model, plan_of(model, num_ranks)), group)
        output = model(x)
        torch.testing.assert_close(output, expected)
        assert "all_gather" not in group.traffic
        output.square().sum().backward()
        assert ("all_gather" in group.traffic) == (name == "Swin")
        torch.testing.assert_close(x.grad, inputs.grad)
        for param, reference in zip(model.parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(split.full(param, param.grad), reference.grad)
        split.restore()
        torch.testing.assert_close(model(x), expected)

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize("name", sorted(TWICE))
def test_gradients_of_gradients_are_the_same(name: str) -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    full = made(name)
    inputs = activation(full).requires_grad_()
    penalty(full, inputs).backward()

    def fn(rank: int) -> None:
        model, x = made(name), activation(full).requires_grad_()
        split = SplitModel(model, match_plan(model, plan_of(model, 2)), all_ranks())
        penalty(model, x).backward()
        torch.testing.assert_close(x.grad, inputs.grad)
        for param, reference in zip(model.parameters(), full.parameters(), strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(split.full(param, param.grad), reference.grad)

    run_ranks(fn, 2)


@pytest.mark.parametrize("name", ["nanoGPT", "minGPT", "timm"])
def test_with_activations_in_slices_of_the_sequence_it_computes_the_same(name: str) -> None:
    full = made(name)
    expected = full(activation(full) * 2)
    expected.square().sum().backward()

    def fn(rank: int) -> None:
        model, group = made(name), all_ranks()
        layers = match_plan(model, plan_of(model, 2))
        split = SplitModel(model, layers, group, sequence_parallel=True)
        output = model(from_local(activation(full).chunk(2, 1)[rank], group, 1) * 2)
        assert isinstance(output, DimShardedTensor)
        assert output.part.dim == 1
        torch.testing.assert_close(full_tensor(output.detach()), expected)
        output.square().sum().backward()
        for param, reference in zip(model.parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(split.full(param, param.grad), reference.grad)

    run_ranks(fn, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_a_checkpoint_drops_the_same_weights_again(flash: bool, use_reentrant: bool) -> None:
    def fn(rank: int) -> None:
        torch.manual_seed(0)
        model = CausalSelfAttention(WIDTH, HEADS, dropout=0.5, flash=flash).double()
        SplitModel(model, match_plan(model, plan_of(model, 2)), all_ranks())

        def step(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
            model.zero_grad()
            torch.manual_seed(3)
            output = call(activation(model).requires_grad_())
            next_number = torch.rand(())
            output.square().sum().backward()
            assert model.c_attn.weight.grad is not None
            return output.detach(), next_number, model.c_attn.weight.grad.clone()

        again = step(partial(checkpoint, model, use_reentrant=use_reentrant))
        for one, other in zip(step(model), again, strict=True):
            torch.testing.assert_close(one, other)

    run_ranks(fn, 2)


def test_each_rank_drops_weights_of_its_own_and_the_common_stream_goes_on() -> None:
    """With equal queries, keys and values of all heads, equal zeros would give equal results."""

    def fn(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        group, x = all_ranks(), torch.ones(2, 1, 64, 8)
        q, k, v = (from_local(x, group, 1) for _ in range(3))
        torch.manual_seed(5)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        assert isinstance(dropped, DimShardedTensor)
        return dropped.part.local, torch.rand(4)

    ranks = [result for result in run_ranks(fn, 2) if result is not None]
    assert not torch.equal(ranks[0][0], ranks[1][0])
    assert torch.equal(ranks[0][1], ranks[1][1])


def test_dropout_step_by_step_is_a_single_devices() -> None:
    def result(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return model(activation(model))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return CausalSelfAttention(WIDTH, HEADS, dropout=0.5, flash=False).double()

    expected = result(make())

    def fn(rank: int) -> None:
        model = make()
        SplitModel(model, match_plan(model, plan_of(model, 2)), all_ranks())
        torch.testing.assert_close(result(model), expected)

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    ("function", "is_dim_sharded"),
    [
        (lambda q: F.scaled_dot_product_attention(q, q, q), True),
        (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), True),
        (lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(3, 3).tril().bool()), True),
        (lambda q: F.scaled_dot_product_attention(q, q, q, BIAS, scale=0.5), True),
        (lambda q: F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2]), True),
        (lambda q: F.scaled_dot_product_attention(q, FULL, FULL), False),
        (lambda q: F.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3), False),
        (lambda q: q @ FULL.mT, True),
        (lambda q: FULL @ q.mT, True),
        (lambda q: q @ FULL[0, 0].mT, True),
        (lambda q: q @ FULL[0, 0, 0], False),
        (lambda q: torch.softmax(q, dim=1), False),
        (lambda q: q.log_softmax(-1), True),
        (lambda q: torch.einsum("bhid,bhjd->bhij", q, FULL), True),
        (lambda q: torch.einsum("bhid,hde->bhie", q, torch.ones(4, 5, 2).double()), True),
        (lambda q: torch.einsum("bhid,de->bhie", q, torch.ones(5, 2).double()), True),
        (lambda q: torch.einsum("bhid,bhjd->bij", q, q), False),
        (lambda q: torch.einsum("bhid,bgid->bhgi", q, q), False),
        (lambda q: torch.einsum("b...,b...->b...", q, q), True),
    ],
)
def test_operations_on_heads(function: Callable[[Tensor], Tensor], is_dim_sharded: bool) -> None:
    expected = function(FULL)

    def fn(rank: int) -> None:
        group = all_ranks()
        result = function(from_local(FULL.chunk(2, 1)[rank], group, 1))
        assert isinstance(result, DimShardedTensor) == is_dim_sharded
        assert ("all_gather" in group.traffic) != is_dim_sharded
        torch.testing.assert_close(full_tensor(result), expected)

    run_ranks(fn, 2)


FULL = torch.randn(2, 4, 3, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(4, 3, 3, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def test_grouped_heads_of_the_kernel_stay_with_their_queries() -> None:
    def attended(q: Tensor, kv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)

    expected = attended(FULL, FULL[:, :2])

    def fn(rank: int) -> None:
        group = all_ranks()
        q, kv = (from_local(one.chunk(2, 1)[rank], group, 1) for one in (FULL, FULL[:, :2]))
        result = attended(q, kv)
        assert "all_gather" not in group.traffic
        torch.testing.assert_close(full_tensor(result), expected)
        with pytest.raises(RuntimeError):  # as many heads of keys as ranks are not one head
            F.scaled_dot_product_attention(q, kv, kv)

    run_ranks(fn, 2)


@pytest.mark.parametrize("make", [NormedQueries, lambda *_: Uncounted(WIDTH - 1)])
def test_what_would_be_gathered_is_left_full(make: Callable[..., nn.Module]) -> None:
    """Nothing would be gained: a norm of all heads; three heads on two ranks."""
    model = make(WIDTH, HEADS)
    net = nn.ModuleDict({"block": model, "sure": Net(nn.Identity()).sure})
    assert {layer.name for layer in automatic_plan(net, 2)} == {"sure.0", "sure.2"}


class NormedKeys(nn.Module):
    """Norms queries and keys of each head; the bias of the keys has a gradient of rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.q_norm, self.k_norm = (nn.LayerNorm(WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = (one.transpose(1, 2) for one in (self.q_norm(query), self.k_norm(key), value))
        attended = F.scaled_dot_product_attention(*heads)
        return self.out_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_gradient_of_rounding_between_the_layers_let_an_attention_be_split_less() -> None:
    """It was compared with itself, and the heads were then split as operations allow."""
    found = blocks(NormedKeys())
    assert [found[f"{one}_proj"] for one in ("q", "k", "v", "out")] == ["colwise"] * 3 + ["rowwise"]


def test_heads_that_do_not_divide_name_the_sizes_that_work() -> None:
    with pytest.raises(ConfigError, match=r"has 3 heads, which 2 ranks .* of 1, 3"):
        automatic_plan(nn.ModuleDict({"attention": CausalSelfAttention(12, 3)}), 2)


def test_an_operation_that_no_rule_knows_is_right_in_a_given_plan() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return NormedQueries(WIDTH, HEADS).double()

    full = make()
    expected = full(activation(full))
    plan = OF_THREE | {"proj": ROWS}

    def fn(rank: int) -> None:
        model, group = make(), all_ranks()
        SplitModel(model, match_plan(model, plan), group)
        torch.testing.assert_close(model(activation(model)), expected)
        assert "all_gather" in group.traffic

    run_ranks(fn, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_holds_its_heads_of_nanogpts_projections(num_ranks: int) -> None:
    """Of weights, and of what is saved for the backward."""

    def fn(rank: int) -> None:
        torch.manual_seed(0)
        attention = CausalSelfAttention(32, HEADS, flash=False)
        layers = match_plan(attention, plan_of(attention, num_ranks))
        SplitModel(attention, layers, all_ranks())
        assert attention.c_attn.weight.shape == (3 * 32 // num_ranks, 32)
        assert attention.c_attn.bias.shape == (3 * 32 // num_ranks,)
        assert attention.c_proj.weight.shape == (32, 32 // num_ranks)
        saved: list[torch.Size] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attention(torch.randn(2, 16, 32, requires_grad=True))
        heads = [shape for shape in saved if len(shape) == 4 and shape[-2:] == (16, 16)]
        assert (2, HEADS // num_ranks, 16, 16) in heads
        assert (2, HEADS, 16, 16) not in heads

    run_ranks(fn, num_ranks)


def test_the_plan_of_the_parity_test_splits_nanogpts_attention() -> None:
    plan = {layer.pattern: layer.style for layer in automatic_plan(SPLIT_MODELS["nanogpt"](), 2)}
    assert plan["network.transformer.h.*.attn.c_attn"].lazy_output
    assert plan["network.transformer.h.*.attn.c_attn"].num_blocks == 3
    assert plan["network.transformer.h.*.attn.c_proj"].form == "rowwise"
    assert "network.transformer.wpe" not in plan
