"""torch's attention by heads computes what it does as a whole, and keeps off its fast paths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.tensor_parallel.test_split import compare

BATCH, TARGETS, SOURCES, WIDTH, HEADS = 3, 5, 6, 16, 4


class Holder(nn.Module):
    """A LightningModule's part in the tests: the layer is inside."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def attention(**options: Any) -> Holder:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    for param in layer.parameters():  # the biases are zero at first
        nn.init.normal_(param, std=0.3)
    return Holder(layer)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss_of(given: Any) -> Tensor:
    tensors = [one for one in given if one is not None] if isinstance(given, tuple) else [given]
    return torch.stack([(one * random(*one.shape)).sum() for one in tensors]).sum()


def causal(targets: int, sources: int) -> Tensor:
    return torch.ones(targets, sources, dtype=torch.bool).triu(1)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask": causal(TARGETS, SOURCES), "is_causal": True},
    "mask of each head": {"attn_mask": random(BATCH * HEADS, TARGETS, SOURCES)},
    "padding": {"key_padding_mask": torch.arange(SOURCES) >= torch.tensor([[6], [4], [5]])},
    "both masks": {
        "attn_mask": causal(TARGETS, SOURCES),
        "key_padding_mask": torch.arange(SOURCES) >= torch.tensor([[6], [4], [5]]),
    },
    "no weights": {"need_weights": False, "attn_mask": causal(TARGETS, SOURCES)},
    "each head's weights": {"average_attn_weights": False},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 8, "vdim": 12}]
)
def test_masks_and_weights_are_those_of_the_full_one(options: dict[str, Any], call: str) -> None:
    widths = WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH)
    inputs = [random(n, BATCH, w) for n, w in zip((TARGETS, SOURCES, SOURCES), widths, strict=True)]
    if options.get("batch_first"):
        inputs = [one.transpose(0, 1) for one in inputs]

    def loss(model: nn.Module) -> Tensor:
        return loss_of(model.layer(*inputs, **CALLS[call]))

    compare(lambda: attention(**options), {"layer": "attention"}, loss, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_a_batch(num_ranks: int) -> None:
    x = random(TARGETS, WIDTH)
    padding = torch.arange(TARGETS) >= 3

    def loss(model: nn.Module) -> Tensor:
        return loss_of(model.layer(x, x, x, key_padding_mask=padding))

    compare(attention, {"layer": "attention"}, loss, num_ranks)


def test_self_attention_sums_the_gradient_of_its_input_once() -> None:
    x = random(TARGETS, BATCH, WIDTH).requires_grad_()
    expected = torch.autograd.grad(loss_of(attention().layer(x, x, x)[0]), x)[0]

    def fn(rank: int) -> int:
        own = x.detach().clone().requires_grad_()
        model, group = attention(), all_ranks()
        SplitModel(model, match_plan(model, {"layer": "attention"}), group)
        loss_of(model.layer(own, own, own, need_weights=False)[0]).backward()
        torch.testing.assert_close(own.grad, expected)
        return group.traffic["all_reduce"].calls

    assert run_ranks(fn, 2) == [2, 2]  # the output, and the gradient of the input


def stack(kind: str, norm_first: bool, batch_first: bool, bias: bool) -> Holder:
    torch.manual_seed(0)
    layer_type = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    layer = layer_type(
        WIDTH, HEADS, 24, 0.0, norm_first=norm_first, batch_first=batch_first, bias=bias
    )
    if kind == "decoder":
        return Holder(nn.TransformerDecoder(layer, 2).double())
    is_fast = batch_first and bias and not norm_first
    return Holder(nn.TransformerEncoder(layer, 2, enable_nested_tensor=is_fast).double())


def run_stack(model: nn.Module, batch_first: bool, **options: Any) -> Tensor:
    inputs = [random(BATCH, TARGETS, WIDTH), random(BATCH, SOURCES, WIDTH)]
    if not batch_first:
        inputs = [one.transpose(0, 1) for one in inputs]
    if isinstance(model.layer, nn.TransformerEncoder):
        return model.layer(inputs[0], **options)
    return model.layer(*inputs, tgt_mask=causal(TARGETS, TARGETS), tgt_is_causal=True)


def planned(make: Callable[[], nn.Module], num_ranks: int) -> dict[str, Any]:
    return {layer.pattern: layer.style for layer in automatic_plan(make(), num_ranks)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_layers_of_torch_are_split_as_one(
    kind: str, norm_first: bool, batch_first: bool, bias: bool
) -> None:
    def make() -> Holder:
        return stack(kind, norm_first, batch_first, bias)

    plan = planned(make, 2)
    attentions = {"encoder": {"self_attn"}, "decoder": {"self_attn", "multihead_attn"}}[kind]
    names = {*attentions, "linear1", "linear2"}
    assert set(plan) == {f"layer.layers.*.{name}" for name in names}
    compare(make, plan, lambda model: loss_of(run_stack(model, batch_first)), 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("only", [("self_attn",), ("linear1", "linear2")])
@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_in_evaluation_is_not_taken(padded: bool, only: tuple[str, ...]) -> None:
    """It would hand a rank's part of the weights to a kernel that takes them for all."""
    padding = torch.arange(TARGETS) >= torch.tensor([[5], [3], [4]]) if padded else None

    def make() -> Holder:
        model = stack("encoder", norm_first=False, batch_first=True, bias=True)
        return model.eval()

    with torch.no_grad():
        expected = run_stack(make(), True, src_key_padding_mask=padding)

    def fn(rank: int) -> None:
        model = make()
        found = planned(make, 2)
        plan = {pattern: found[pattern] for pattern in (f"layer.layers.*.{one}" for one in only)}
        split = SplitModel(model, match_plan(model, plan), all_ranks())
        with torch.no_grad():
            got = run_stack(model, True, src_key_padding_mask=padding)
            if padding is not None:  # torch's fast path puts zeros there
                got = got.masked_fill(padding.unsqueeze(-1), 0)
            torch.testing.assert_close(got, expected)
            split.restore()
            again = run_stack(model, True, src_key_padding_mask=padding)
        assert torch.equal(again, expected)

    run_ranks(fn, 2)


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        output, weights = super().forward(*args, **options)
        return 2 * output, weights


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True),
        lambda: nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True),
        lambda: Doubled(WIDTH, HEADS),
    ],
)
def test_an_attention_that_is_not_torch_s_own_is_left_full(make: Callable[[], nn.Module]) -> None:
    feed_forward = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = nn.ModuleDict({"layer": make(), "other": feed_forward})
    plan = automatic_plan(model, 2)
    assert {layer.name for layer in plan} == {"other.0", "other.2"}
    with pytest.raises(ConfigError, match="expected torch's MultiheadAttention"):
        match_plan(model, {"layer": "attention"})
