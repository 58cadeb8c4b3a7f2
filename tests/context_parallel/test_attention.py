"""Attention of a sequence in parts equals that of the full one, in results and gradients."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard.context_parallel.crossings import cut_sequence
from lightning_shard.context_parallel.sequence_part import FullSequences, SequencePart, padded
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor, wrapped
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

BATCH, LENGTH, WIDTH = 2, 8, 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.tril(-3)
PACKED = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool() & CAUSAL
PADDED = (torch.arange(LENGTH) < torch.tensor([[8], [5]]))[:, None, None, :]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def in_parts(tensors: Sequence[Tensor], dim: int) -> tuple[list[Tensor], FullSequences]:
    """Return the tensors cut over all ranks, and what hears of operations that are not."""
    group = all_ranks()
    in_full = FullSequences(group.size)
    in_full.block = "block"
    padding = -tensors[0].shape[dim] % group.size
    cut = [cut_sequence(padded(one, dim, padding), dim, group) for one in tensors]
    options: dict[str, Any] = {"dim": dim, "group": group, "in_full": in_full, "padding": padding}
    return [wrapped(SequencePart(local=one, **options)) for one in cut], in_full


def mean(grad: Tensor) -> Tensor:
    torch.distributed.all_reduce(grad)
    return grad / torch.distributed.get_world_size()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("heads", "key_heads", "options"),
    [
        pytest.param(4, 4, {"is_causal": True}, id="causal"),
        pytest.param(4, 4, {}, id="full"),
        pytest.param(4, 4, {"attn_mask": WINDOW}, id="sliding window"),
        pytest.param(4, 4, {"attn_mask": PACKED}, id="packed documents"),
        pytest.param(4, 4, {"attn_mask": PADDED}, id="padded"),
        pytest.param(4, 4, {"attn_mask": drawn(4, LENGTH, LENGTH)}, id="a bias of each head"),
        pytest.param(4, 4, {"attn_mask": drawn(LENGTH, LENGTH)}, id="a bias of all heads"),
        pytest.param(4, 2, {"is_causal": True, "enable_gqa": True}, id="grouped queries"),
        pytest.param(4, 1, {"is_causal": True, "enable_gqa": True}, id="one head of keys"),
        pytest.param(12, 6, {"attn_mask": WINDOW, "enable_gqa": True}, id="groups across ranks"),
        pytest.param(3, 3, {"is_causal": True}, id="heads that cannot be shared out, causal"),
        pytest.param(1, 1, {"attn_mask": PACKED}, id="one head, packed"),
        pytest.param(3, 3, {"attn_mask": drawn(3, LENGTH, LENGTH)}, id="one head each, a bias"),
    ],
)
def test_it_equals_that_of_the_full_sequence(
    num_ranks: int, heads: int, key_heads: int, options: dict[str, Any]
) -> None:
    shapes = [(BATCH, one, LENGTH, WIDTH) for one in (heads, key_heads, key_heads)]
    inputs = [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    mask = options.get("attn_mask")
    sources = [*inputs, *([mask] if mask is not None and mask.requires_grad else [])]
    expected = F.scaled_dot_product_attention(*inputs, **options)
    direction = drawn(*expected.shape, seed=9).detach()
    grads = torch.autograd.grad(expected, sources, direction)

    def of_rank(rank: int) -> tuple[Tensor, list[Tensor], dict[str, str]]:
        own = [one.detach().requires_grad_() for one in sources]
        parts, in_full = in_parts(own[:3], 2)
        given = options | ({"attn_mask": own[3]} if len(own) > 3 else {})
        result = F.scaled_dot_product_attention(*parts, **given)
        full = full_tensor(result)
        found = torch.autograd.grad(full, own, direction)
        return full.detach(), [mean(one.contiguous()) for one in found], in_full.noted

    for result, found, noted in run_ranks(of_rank, num_ranks):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-5, atol=1e-6)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert not noted


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", [None, ~CAUSAL, (~CAUSAL).float().masked_fill(~CAUSAL, -1e4)])
def test_multihead_attention_is_cut_as_a_layer(
    num_ranks: int, need_weights: bool, batch_first: bool, mask: Tensor | None
) -> None:
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(8, 4, batch_first=batch_first)
    x = drawn(BATCH, LENGTH, 8) if batch_first else drawn(LENGTH, BATCH, 8)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 6:] = True
    options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
    if mask is not None and mask.is_floating_point():
        options["key_padding_mask"] = padding.float().masked_fill(padding, -1e4)
    expected, weights = layer(x, x, x, **options)
    sources = [x, *layer.parameters()]
    grads = torch.autograd.grad(expected.square().sum(), sources)

    def of_rank(rank: int) -> tuple[Any, list[Tensor], dict[str, str]]:
        own = x.detach().requires_grad_()
        (part,), in_full = in_parts([own], 1 if batch_first else 0)
        result, shown = layer(part, part, part, **options)
        full, shown = full_tensor(result), full_tensor(shown)
        found = torch.autograd.grad(full.square().sum(), [own, *layer.parameters()])
        return (full.detach(), shown), [mean(one.contiguous()) for one in found], in_full.noted

    for (result, shown), found, noted in run_ranks(of_rank, num_ranks):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(shown, weights, rtol=1e-5, atol=1e-6)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not noted
