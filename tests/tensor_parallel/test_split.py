"""A split model computes what the full one does: outputs, gradients, and the whole again."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.train_gpt import GPT
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

GPT_PLAN = {
    "byte_embedding": "embedding_rowwise",
    "position_embedding": "embedding_colwise",
    "blocks.*.qkv": "packed_colwise(3)",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def small_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(context=8, num_layers=2, num_heads=4, width=16, **options).double()


def compare(
    make: Callable[[], nn.Module],
    plan: Mapping[str, Any],
    loss: Callable[[nn.Module], Tensor],
    num_ranks: int,
) -> None:
    full = make()
    expected_loss = loss(full)
    expected_loss.backward()

    def fn(rank: int) -> None:
        model = make()
        before = copy.deepcopy(model.state_dict())
        split = SplitModel(model, match_plan(model, plan), all_ranks())
        own = loss(model)
        torch.testing.assert_close(own, expected_loss)
        own.backward()
        for (name, param), reference in zip(
            model.named_parameters(), full.parameters(), strict=True
        ):
            assert param.grad is not None, name
            gradient = split.full(param, param.grad)
            torch.testing.assert_close(gradient, reference.grad, msg=lambda m, n=name: f"{n}: {m}")
        for param in model.parameters():
            param.grad = None
        split.restore()
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
        assert type(model) is type(full)
        torch.testing.assert_close(loss(model), expected_loss)

    run_ranks(fn, num_ranks)


def gpt_loss(model: nn.Module) -> Tensor:
    assert isinstance(model, GPT)
    text = torch.arange(24).view(3, 8) * 9 % 256
    return model.loss([text, text.roll(1)])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_the_example_gpt(num_ranks: int, tied: bool) -> None:
    plan = GPT_PLAN
    compare(lambda: small_gpt(tie_embeddings=tied), plan, gpt_loss, num_ranks)


def test_projections_of_one_activation_sum_its_gradient_once() -> None:
    def fn(rank: int) -> int:
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "qkv"})
        group = all_ranks()
        SplitModel(model, match_plan(model, {"*": "colwise"}), group)
        x = torch.ones(2, 4, requires_grad=True)
        sum(layer(x).sum() for layer in model.values()).backward()
        return group.traffic["all_reduce"].calls

    assert run_ranks(fn, 2) == [1, 1]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.up": "colwyse"}, "unknown style 'colwyse'.* Did you mean 'colwise'?"),
        ({"blocks.*.upp": "colwise"}, r"matches no module of GPT; the nearest are blocks\.\*\.up"),
        ({"blocks.*.up": "colwise", "blocks.0.u*": "rowwise"}, "'blocks.0.up' is matched by"),
        ({"blocks.*": "colwise"}, "it is a Block; expected a linear layer"),
        (
            {"norm": "embedding_rowwise"},
            "it is a torch.nn.modules.normalization.LayerNorm; expected an Embedding",
        ),
        ({"blocks.*.qkv": "packed_colwise(5)"}, "expected a multiple of 5"),
    ],
)
def test_a_wrong_plan_is_refused(plan: dict[str, str], message: str) -> None:
    def fn(rank: int) -> None:
        model = small_gpt()
        with pytest.raises(ConfigError, match=message):
            SplitModel(model, match_plan(model, plan), all_ranks())

    run_ranks(fn, 1)


def test_more_ranks_than_heads_names_the_sizes_that_work() -> None:
    def fn(rank: int) -> None:
        model = small_gpt()
        with pytest.raises(
            ConfigError, match=r"Block\.num_heads is 4, which 8 ranks .* of 1, 2, 4"
        ):
            SplitModel(model, match_plan(model, GPT_PLAN), all_ranks())

    run_ranks(fn, 8)


def test_a_tied_weight_that_is_cut_in_two_ways_is_refused() -> None:
    plan = GPT_PLAN | {"byte_embedding": "embedding_colwise"}

    def fn(rank: int) -> None:
        model = small_gpt(tie_embeddings=True)
        with pytest.raises(ConfigError, match=r"head\.weight is tied .* along dimension 1, but"):
            SplitModel(model, match_plan(model, plan), all_ranks())

    run_ranks(fn, 2)
