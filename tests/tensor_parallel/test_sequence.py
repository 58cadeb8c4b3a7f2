"""Activations in slices of the sequence: the same numbers, fewer saved bytes, in any module."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from examples.train_gpt import GPT
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    from_local,
    full_tensor,
)
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

GPT_PLAN = {
    "byte_embedding": "embedding_rowwise",
    "blocks.*.qkv": "packed_colwise(3)",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_logits",
}
LLAMA_PLAN = {
    **{f"model.layers.*.self_attn.{one}_proj": "colwise" for one in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_logits",
}
GPT2_PLAN = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn": "packed_colwise(3)",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_logits",
}
ENCODER_PLAN = {"*.self_attn": "attention", "*.linear1": "colwise", "*.linear2": "rowwise"}
TEXT = torch.arange(24).view(3, 8) * 9 % 64


def gpt() -> nn.Module:
    return GPT(context=8, num_layers=2, num_heads=4, width=16)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.1)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=4, attn_pdrop=0.0, **rates
    )
    return GPT2LMHeadModel(config)


def encoder(*, batch_first: bool = True, norm_first: bool = False) -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        for _ in range(2)
    ]
    return nn.Sequential(*layers, nn.LayerNorm(16))


def gpt_loss(model: Any) -> Tensor:
    loss: Tensor = model.loss([TEXT, TEXT.roll(1)])
    return loss


def hugging_face_loss(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=TEXT, labels=TEXT).loss
    return loss


def encoder_loss(model: Any) -> Tensor:
    x = torch.sin(torch.arange(4 * 8 * 16, dtype=torch.double)).view(4, 8, 16)
    loss: Tensor = (model(x) * x.roll(1)).sum()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, str], Callable[[Any], Tensor]]] = {
    "gpt": (gpt, GPT_PLAN, gpt_loss),
    "llama": (llama, LLAMA_PLAN, hugging_face_loss),
    "gpt2 with dropout": (gpt2, GPT2_PLAN, hugging_face_loss),
    "encoder": (encoder, ENCODER_PLAN, encoder_loss),
    "encoder, norm first": (lambda: encoder(norm_first=True), ENCODER_PLAN, encoder_loss),
    "encoder, batch second": (lambda: encoder(batch_first=False), ENCODER_PLAN, encoder_loss),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_full_model(name: str, num_ranks: int) -> None:
    make, plan, loss = CASES[name]
    full = made(make)
    torch.manual_seed(1)  # of the dropout
    expected = loss(full)
    expected.backward()

    def fn(rank: int) -> set[str]:
        model, group = made(make), all_ranks()
        split = SplitModel(model, match_plan(model, plan), group, sequence_parallel=True)
        torch.manual_seed(1)
        own = loss(model)
        torch.testing.assert_close(own, expected)
        own.backward()
        for (param_name, param), reference in zip(
            model.named_parameters(), full.parameters(), strict=True
        ):
            if reference.grad is not None:
                assert param.grad is not None, param_name
                torch.testing.assert_close(
                    split.full(param, param.grad),
                    reference.grad,
                    msg=lambda message, n=param_name: f"{n}: {message}",
                )
        return set(group.traffic)

    for operations in run_ranks(fn, num_ranks):
        assert operations is not None
        assert "reduce_scatter" in operations


def saved_bytes(function: Callable[[], Tensor], params: set[int]) -> int:
    """Return the bytes of the memory that a forward keeps for backward, without parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(kept.values())


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_less_is_kept_for_backward(name: str) -> None:
    make, plan, loss = CASES[name]

    def fn(rank: int) -> list[int]:
        result = []
        for sequence_parallel in (False, True):
            model, group = made(make), all_ranks()
            layers = match_plan(model, plan)
            SplitModel(model, layers, group, sequence_parallel=sequence_parallel)
            params = {param.untyped_storage().data_ptr() for param in model.parameters()}
            result.append(saved_bytes(lambda m=model: loss(m), params))  # type: ignore[misc]
        return result

    for counts in run_ranks(fn, 4):
        assert counts is not None
        without, with_slices = counts
        assert with_slices < 0.7 * without


def test_projections_of_one_activation_gather_it_once_each_way() -> None:
    def fn(rank: int) -> None:
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "qkv"})
        group = all_ranks()
        SplitModel(model, match_plan(model, {"*": "colwise"}), group, sequence_parallel=True)
        local = torch.ones(2, 2, 4, requires_grad=True)
        x = from_local(local * 1, group, 1)
        loss = sum(layer(x).square().sum() for layer in model.values())
        assert group.traffic["all_gather"].calls == 1
        loss.backward(retain_graph=True)
        assert group.traffic["all_gather"].calls == 2
        first = local.grad
        local.grad = None
        loss.backward()
        assert group.traffic["all_gather"].calls == 3
        assert first is not None
        torch.testing.assert_close(local.grad, first)
        assert group.traffic["reduce_scatter"].calls == 2

    run_ranks(fn, 2)


def test_blocks_see_the_full_shape_and_what_cannot_be_sliced_is_gathered() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.positions = nn.Parameter(torch.linspace(0, 1, 32).view(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.scale * self.down(self.up(x))
            shapes.append(tuple(x.shape))
            x = x + self.positions[: x.shape[1]]
            x = x + torch.cumsum(x, 1)  # over positions
            return self.down(self.up(F.dropout(x, 0.5)))

    shapes: list[tuple[int, ...]] = []
    plan = {"up": "colwise", "down": "rowwise"}
    x = torch.linspace(-1, 1, 64, dtype=torch.double).view(2, 8, 4)
    full = made(Odd)
    torch.manual_seed(1)
    expected = full(x).square().sum()
    expected.backward()

    def fn(rank: int) -> None:
        model = made(Odd)
        split = SplitModel(model, match_plan(model, plan), all_ranks(), sequence_parallel=True)
        torch.manual_seed(1)
        result = model(x)
        assert isinstance(result, DimShardedTensor)
        assert result.part.local.shape == (2, 4, 4)
        result.square().sum().backward()
        for param, reference in zip(model.parameters(), full.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(split.full(param, param.grad), reference.grad)

    run_ranks(fn, 2)
    assert set(shapes) == {(2, 8, 4)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_recompute_the_same(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module, is_on: bool) -> None:
            super().__init__()
            self.block, self.is_on = block, is_on

        def forward(self, x: Tensor) -> Any:
            def inner(x: Tensor) -> Tensor:
                return F.dropout(self.block(x), 0.3)

            return checkpoint(inner, x, use_reentrant=reentrant) if self.is_on else inner(x)

    def gradients(*, is_on: bool) -> list[Tensor | None]:
        model: Any = made(gpt)
        SplitModel(model, match_plan(model, GPT_PLAN), all_ranks(), sequence_parallel=True)
        model.blocks = nn.ModuleList(Checkpointed(block, is_on) for block in model.blocks)
        torch.manual_seed(1)
        gpt_loss(model).backward()
        return [param.grad for param in model.parameters()]

    def fn(rank: int) -> None:
        for own, other in zip(gradients(is_on=True), gradients(is_on=False), strict=True):
            assert own is not None
            torch.testing.assert_close(own, other)

    run_ranks(fn, 2)


def test_an_odd_length_is_refused_in_training_and_full_without_gradients() -> None:
    def fn(rank: int) -> None:
        model, full = made(gpt), made(gpt)
        SplitModel(model, match_plan(model, GPT_PLAN), all_ranks(), sequence_parallel=True)
        odd = TEXT[:, :7]
        with pytest.raises(ConfigError, match=r"\(3, 7, 16\) into 2 slices.* Pad the batches"):
            model(odd)
        with torch.no_grad():
            torch.testing.assert_close(full_tensor(model(odd)), full(odd))

    run_ranks(fn, 2)


def test_under_autocast_what_enters_is_gathered_in_the_narrow_type() -> None:
    def fn(rank: int) -> None:
        model, group = nn.Linear(4, 4), all_ranks()
        wrapped = nn.ModuleDict({"up": model})
        SplitModel(wrapped, match_plan(wrapped, {"up": "colwise"}), group, sequence_parallel=True)
        local = torch.ones(2, 2, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            result = model(from_local(local * 1, group, 1))
        assert result.dtype == torch.bfloat16
        assert group.traffic["all_gather"].bytes == 2 * local.numel()
        result.sum().backward()
        assert local.grad is not None
        assert local.grad.dtype == torch.float32

    run_ranks(fn, 2)
