"""Attention functions that transformers knows by name get this rank's heads of full sequences."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.testing import run_ranks
from tests.context_parallel.test_hugging_face import SIZES, packed, padded, text
from tests.groups import all_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")
NAME = "kernel_of_its_own"


class Kernel(torch.autograd.Function):
    """Sees tensors that have memory, and no subclass of them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        for one in (query, key, value):
            assert type(one) is Tensor
            assert one.data_ptr()
        ctx.save_for_backward(query, key, value)
        ctx.mask = mask
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(*own, attn_mask=ctx.mask)
        return *torch.autograd.grad(result, own, grads[0]), None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    times = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(times, 1).contiguous() for one in (key, value))
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    mixed = Kernel.apply(query.contiguous(), key, value, attention_mask)
    return mixed.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    yield
    assert AttentionInterface()[NAME] is attend  # as it was, once no rank needs it
    AttentionInterface._global_mapping.pop(NAME)
    AttentionMaskInterface._global_mapping.pop(NAME)


def qwen2(heads: int = 4, attention: str = NAME) -> nn.Module:
    torch.manual_seed(0)
    sizes = SIZES | {"num_attention_heads": heads, "num_key_value_heads": max(heads // 2, 1)}
    config = hf.Qwen2Config(**sizes, attn_implementation=attention, use_cache=False)
    return hf.Qwen2ForCausalLM(config).train()


def results(model: nn.Module, inputs: dict[str, Tensor], ranks: Any = None) -> list[Tensor]:
    loss = model(**inputs).loss
    loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads if ranks is not None else ():
        ranks.all_reduce(grad, "avg")
    return [loss.detach(), *grads]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("inputs", [text, padded, packed], ids=["text", "padded", "packed"])
def test_a_kernel_is_given_own_heads_of_the_full_sequence(inputs: Any, num_ranks: int) -> None:
    expected = results(qwen2(), inputs())

    def of_rank(rank: int) -> list[Tensor]:
        model, ranks = qwen2(), all_ranks()
        cut = CutBlocks(model, ranks)
        found = results(model, inputs(), ranks)
        assert not cut.in_full.noted
        ranks.barrier()
        cut.restore()
        return found

    for found in run_ranks(of_rank, num_ranks):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_heads_that_ranks_cannot_share_out_are_refused_by_name() -> None:
    def of_rank(rank: int) -> None:
        model, ranks = qwen2(heads=2), all_ranks()
        cut = CutBlocks(model, ranks)
        with pytest.raises(ConfigError, match="cannot share out 2 of them; expected a divisor"):
            results(model, text())
        ranks.barrier()
        cut.restore()

    run_ranks(of_rank, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method", "ignore::DeprecationWarning")
@pytest.mark.parametrize("inputs", [text, padded, packed], ids=["text", "padded", "packed"])
def test_flex_attention_with_block_masks_is_that_of_the_full_sequence(inputs: Any) -> None:
    """Its CPU kernel has no backward, so results alone are compared."""
    with torch.no_grad():
        expected = qwen2(attention="flex_attention")(**inputs()).logits
        by_torch = qwen2(attention="sdpa")(**inputs()).logits
    is_padded = inputs is padded
    torch.testing.assert_close(
        expected[: 1 if is_padded else 2], by_torch[: 1 if is_padded else 2], rtol=1e-4, atol=1e-5
    )

    def of_rank(rank: int) -> Tensor:
        model, ranks = qwen2(attention="flex_attention"), all_ranks()
        cut = CutBlocks(model, ranks, tries=False)
        with torch.no_grad():
            found = full_tensor(model(**inputs()).logits)
        ranks.barrier()
        cut.restore()
        return found

    for found in run_ranks(of_rank, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_takes_no_parts_is_refused_by_name() -> None:
    class Black(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if type(y) is not Tensor:
                raise TypeError("a tensor with memory is needed")
            return y

    def of_rank(rank: int) -> None:
        model = nn.Sequential(Black(), Black())
        cut = CutBlocks(model, all_ranks())
        message = r"block '0' \(Black\) runs with the full sequence, but not with a sequence in 2"
        with pytest.raises(ConfigError, match=message):
            model(torch.ones(2, 4, 16, requires_grad=True))
        cut.restore()

    run_ranks(of_rank, 2)
