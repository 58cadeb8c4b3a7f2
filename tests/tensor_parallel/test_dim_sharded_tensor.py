"""Logits sharded behave as whole ones; which operations leave them in parts, literally."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from examples.train_gpt import GPT
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    from_local,
    full_tensor,
)
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.tensor_parallel.styles import style_of
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

B, T, V = 2, 3, 16
TARGET = torch.tensor([[1, 7, 2], [0, -100, 4]])
BIAS = torch.linspace(-1, 1, V, dtype=torch.double)
ROWS = torch.tensor([[True, False, True], [False, True, True]])


def full_logits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, T, V, dtype=torch.double, generator=generator)


def apply(function: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, bool, dict[str, int]]]:
    """Apply to whole logits and to logits sharded; compare values, gradients and versions.

    Returns:
        Of each rank: the result, whether it is sharded, and the elements sent before backward.
    """
    full = full_logits().requires_grad_()
    expected = function(full * 1)
    if expected.requires_grad:
        factors = torch.linspace(1, 2, expected.numel(), dtype=torch.double).view_as(expected)
        (expected.double() * factors).sum().backward()

    def fn(rank: int) -> tuple[Tensor, bool, dict[str, int]]:
        group = all_ranks()
        local = full_logits().chunk(group.size, -1)[rank].clone().requires_grad_()
        result = function(from_local(local * 1, group))
        sent = {name: traffic.elements for name, traffic in group.traffic.items()}
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert result.requires_grad == expected.requires_grad
        torch.testing.assert_close(full_tensor(result.detach()), expected.detach())
        if expected.requires_grad:
            (result.double() * factors).sum().backward()
            assert full.grad is not None
            torch.testing.assert_close(local.grad, full.grad.chunk(group.size, -1)[rank])
        return result.detach(), isinstance(result, DimShardedTensor), sent

    ranks = run_ranks(fn, 2)
    return [result for result in ranks if result is not None]


SHARDED: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(0, 1),
    "torch.flatten": lambda x: torch.flatten(x, 0, -2),
    "view": lambda x: x.view(-1, V),
    "view, the last dimension left out": lambda x: x.view(B * T, -1),
    "view of a shape": lambda x: x.view(torch.Size((T, B, V))),
    "reshape": lambda x: x.reshape(B, 1, T, V),
    "torch.reshape": lambda x: torch.reshape(x, (-1, V)),
    "a slice of positions": lambda x: x[:, :-1],
    "a slice with an ellipsis": lambda x: x[..., :-1, :],
    "contiguous": lambda x: x[:, 1:, :].contiguous(),
    "one position": lambda x: x[:, -1],
    "one sample": lambda x: x[0],
    "an ellipsis alone": lambda x: x[...],
    "a mask of rows": lambda x: x[ROWS],
    "indices": lambda x: x[torch.tensor([1, 0, 1]), :2],
    "a list": lambda x: x[[1, 0]],
    "by keyword": lambda x: torch.flatten(input=x, start_dim=0, end_dim=1),
    "a new axis": lambda x: x[:, None],
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(torch.ones(1)),
    "transpose": lambda x: x.transpose(0, 1),
    "transpose of the classes": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze behind": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "split": lambda x: x.split(2, dim=1)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "a scale": lambda x: 2 * x / 3 - 1,
    "a soft cap": lambda x: torch.tanh(x / 30) * 30,
    "a temperature of each row": lambda x: x / torch.tensor([[1.0], [2.0], [3.0]]),
    "a bias of each class": lambda x: x + BIAS,
    "another of its kind": lambda x: x + x.exp(),
    "in place": lambda x: x.div_(2).mul_(3),
    "an operator in place": lambda x: x.__itruediv__(2),
    "a filled mask": lambda x: x.masked_fill(BIAS > 0.5, -1),
    "where": lambda x: torch.where(BIAS > 0, x, -1.0),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, 2 * x], dim=2),
    "a new axis behind": lambda x: x[..., None],
    "flatten of the classes": lambda x: x.flatten(),
    "view of the classes": lambda x: x.view(B, T, 2, V // 2),
    "the type of another shape": lambda x: x.type_as(torch.ones(V, 1, 1, dtype=torch.float32)),
}

GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "argmax": lambda x: x.argmax(-1),
    "sum": lambda x: x.sum(),
    "one class": lambda x: x[..., 3],
    "where, of one tensor": lambda x: torch.where(x)[2],
    "some classes": lambda x: x[:, :, 1:5],
    "classes of their own": lambda x: x[ROWS, :][:, [1, 2]],
    "a split of the classes": lambda x: x.split(3, dim=-1)[0],
    "a mask of numpy's": lambda x: x[np.asarray(ROWS), :][:, 1],
    "keywords that are not looked at": lambda x: x.chunk(chunks=2, dim=1)[0],
    "axes by keyword": lambda x: torch.swapaxes(x, axis0=0, axis1=1),
    "a mean of all classes": lambda x: torch.mean(input=x, dim=-1),
    "into a plain tensor": lambda x: torch.zeros(B, T, V, dtype=torch.double).add_(x),
    "matmul": lambda x: x @ BIAS,
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "topk": lambda x: x.topk(2, dim=-1).values,
    "targets that are probabilities": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.full((B * T, V), 1 / V, dtype=torch.double)
    ),
    "classes in the middle": lambda x: F.cross_entropy(x, torch.zeros(B, V, dtype=torch.long)),
}


@pytest.mark.parametrize("name", SHARDED)
def test_stays_in_parts_and_sends_nothing(name: str) -> None:
    for _, is_dim_sharded, sent in apply(SHARDED[name]):
        assert is_dim_sharded
        assert sent == {}


@pytest.mark.parametrize("name", GATHERED)
def test_anything_else_is_of_the_gathered_full(name: str) -> None:
    for _, is_dim_sharded, sent in apply(GATHERED[name]):
        assert not is_dim_sharded
        assert set(sent) == {"all_gather"}


def set_class(x: Tensor) -> Tensor:
    x[:, :, 1] = 5.0
    return x


def set_through_a_view(x: Tensor) -> Tensor:
    x.flatten(0, 1)[2:4] = x.flatten(0, 1)[:2] * 2
    return x


def softmax_into(x: Tensor) -> Tensor:
    x = x.detach()
    torch.softmax(x.clone(), -1, out=x)
    return x


def mixed_in_place(x: Tensor) -> Tensor:
    return x.cumsum_(-1)


@pytest.mark.parametrize("write", [set_class, set_through_a_view, softmax_into, mixed_in_place])
def test_what_is_written_goes_into_the_parts(write: Callable[[Tensor], Tensor]) -> None:
    assert all(from_local for _, is_dim_sharded, _ in apply(write))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()),
    "a module": lambda x: nn.CrossEntropyLoss(reduction="sum")(x.view(-1, V), TARGET.view(-1)),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGET, label_smoothing=0.1),
    "not reduced": lambda x: F.cross_entropy(x.mT, TARGET, reduction="none", weight=BIAS.exp()),
    "one row": lambda x: F.cross_entropy(x[0, 0], TARGET[0, 0]),
    "in chunks": lambda x: torch.stack(
        [
            F.cross_entropy(one, target, reduction="sum")
            for one, target in zip(x.flatten(0, 1).split(4), TARGET.flatten().split(4), strict=True)
        ]
    ).sum(),
    "Hugging Face, causal": lambda x: ForCausalLMLoss(x, TARGET, V),
    "Hugging Face, number of items": lambda x: ForCausalLMLoss(
        x, TARGET, V, num_items_in_batch=torch.tensor(5)
    ),
    "Hugging Face, masked": lambda x: ForMaskedLMLoss(x, TARGET, V),
    "checkpointed": lambda x: checkpoint(
        lambda y: F.cross_entropy(y.flatten(0, 1), TARGET.flatten()), x, use_reentrant=False
    ),
    "checkpointed, reentrant": lambda x: checkpoint(
        lambda y: F.cross_entropy(y.flatten(0, 1), TARGET.flatten()), x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_parts_is_the_loss_of_the_full_one(name: str) -> None:
    for _, is_dim_sharded, sent in apply(LOSSES[name]):
        assert not is_dim_sharded
        assert sent["all_gather"] <= 4 * B * T  # the logits would be B * T * V / 2


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        with torch._C.DisableTorchFunctionSubclass():
            return logits * logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_an_autograd_function_of_the_user_sees_the_full() -> None:
    for _, is_dim_sharded, _ in apply(lambda x: _Doubled.apply(x)):
        assert not is_dim_sharded


def test_what_was_changed_in_place_is_refused_by_an_autograd_function() -> None:
    def fn(rank: int) -> None:
        sharded = from_local(torch.ones(2, 2, requires_grad=True) * 1, all_ranks())
        sharded.mul_(2)
        assert sharded.sum().item() == 16
        with pytest.raises(ConfigError, match=f"Rank {rank}: .* Use x = x \\+ y for x \\+= y"):
            _Doubled.apply(sharded).sum().backward()

    run_ranks(fn, 2)


def test_what_writes_below_autograd_is_refused() -> None:
    def fn(rank: int) -> None:
        logits = from_local(torch.zeros(2, 2), all_ranks())
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ConfigError, match="colwise_g"):
            logits.mul_(2)

    run_ranks(fn, 2)


def test_hooks_and_retained_gradients_are_those_of_the_full_one() -> None:
    def fn(rank: int) -> None:
        group = all_ranks()
        local = full_logits().chunk(2, -1)[rank].clone().requires_grad_()
        logits = from_local(local * 1, group)
        seen: list[torch.Size] = []

        def hook(grad: Tensor) -> Tensor:
            seen.append(grad.shape)
            return grad * 2

        logits.register_hook(hook)
        logits.retain_grad()
        (logits * BIAS).sum().backward()
        assert seen == [(B, T, V)]
        torch.testing.assert_close(full_tensor(logits.grad), 2 * BIAS.expand(B, T, V))
        torch.testing.assert_close(local.grad, logits.grad.part.local)

    run_ranks(fn, 2)


def test_printing_and_asking_for_shapes_needs_no_other_rank() -> None:
    def fn(rank: int) -> None:
        group = all_ranks()
        logits = from_local(torch.zeros(B, T, V // 2), group)
        if rank == 0:
            assert repr(logits).startswith("DimShardedTensor(shape=(2, 3, 16), part=tensor(")
            assert (logits.size(-1), logits.dim(), len(logits), logits.numel()) == (V, 3, B, 96)
            assert logits.is_floating_point()
            assert f"{type(logits).__name__}" == "DimShardedTensor"
        assert copy.deepcopy(logits).shape == (B, T, V)
        assert group.traffic["all_gather"].calls == 1

    run_ranks(fn, 2)


def test_on_one_rank_they_are_plain() -> None:
    def fn(rank: int) -> None:
        assert type(from_local(torch.zeros(2), all_ranks())) is Tensor

    run_ranks(fn, 1)


def test_torchs_style_for_a_parallel_loss_is_the_same_style() -> None:
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    assert style_of(style, "head") == style_of("colwise_logits", "head")


HEAD_PLAN = {"byte_embedding": "embedding_rowwise", "head": "colwise_logits"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_step_of_the_example_never_gathers_the_logits(tied: bool) -> None:
    def make() -> GPT:
        torch.manual_seed(0)
        return GPT(context=8, num_layers=1, num_heads=2, width=16, tie_embeddings=tied).double()

    text = torch.arange(24).view(3, 8) * 9 % 256
    full = make()
    expected = full.loss([text, text.roll(1)])
    expected.backward()

    def fn(rank: int) -> None:
        model, group = make(), all_ranks()
        split = SplitModel(model, match_plan(model, HEAD_PLAN), group)
        widest: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            widest.append(tensor.shape[-1] if tensor.ndim > 1 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.loss([text, text.roll(1)])
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert max(widest) == 256 // group.size
        assert group.traffic["all_gather"].elements == (group.size - 1) * 3 * text.numel()
        for param, reference in zip(model.parameters(), full.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(split.full(param, param.grad), reference.grad)

    run_ranks(fn, 2)
    run_ranks(fn, 4)
