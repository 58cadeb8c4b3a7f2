"""Adapters around linear layers are split as their layer, others stay full."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.probe import with_tried_wrappers
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

WIDTH, HIDDEN, RANK = 8, 16, 2
PLAN = {"up": "colwise", "down": "rowwise"}


class Linear(nn.Module):
    """Low-rank adapters by name, as peft has them, beside a frozen layer."""

    def __init__(self, base_layer: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        inputs, outputs = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_embedding_A = nn.ParameterDict()
        self.scaling = {"default": 2.0}

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        for name, down in self.lora_A.items():
            x = self.lora_dropout[name](x.to(down.weight.dtype))
            result = result + self.lora_B[name](down(x)) * self.scaling[name]
        return result


class Named(nn.Module):
    """The same in words of one's own."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.narrow = nn.Linear(inner.in_features, RANK, bias=False)
        self.widen = nn.Linear(RANK, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.widen(self.narrow(x))


class Normed(Linear):
    """Adapters whose result depends on the norm of all weights, as DoRA's does."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__(base_layer)
        self.magnitude = nn.Parameter(torch.rand(base_layer.out_features) + 0.5)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        low = self.lora_B["default"].weight @ self.lora_A["default"].weight
        weight = self.base_layer.weight + low
        return F.linear(x, weight * (self.magnitude / weight.norm(dim=1))[:, None])


class OfParameters(nn.Module):
    """Written by hand: the matrices are parameters of the wrapper itself."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.A = nn.Parameter(torch.randn(linear.in_features, RANK))
        self.B = nn.Parameter(torch.randn(RANK, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.A @ self.B


class Subclass(nn.Linear):
    """A Linear with matrices of its own beside the weight, as loralib has it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.lora_A = nn.Parameter(torch.randn(RANK, linear.in_features))
        self.lora_B = nn.Parameter(torch.randn(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class Kept(nn.Module):
    """A copy that is trained in the layer's place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer)})
        self.modules_to_save.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class MLP(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.up = wrap(nn.Linear(WIDTH, HIDDEN))
        self.down = wrap(nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Sized(Linear):
    """Looks at the size of its layer's weight, of which each rank has a part."""

    def forward(self, x: Tensor) -> Tensor:
        if len(self.base_layer.weight) < WIDTH + HIDDEN - self.base_layer.weight.shape[1]:
            raise ValueError("rows were lost")
        return super().forward(x)


def test_what_a_wrapper_raises_in_its_trial_is_told() -> None:
    """It was said to compute something else in parts."""
    layers = match_plan(made(Sized), {"up": "colwise"})
    with pytest.warns(UserWarning, match="in parts, which raised ValueError: rows were lost; it"):
        (layer,) = with_tried_wrappers(layers, 2)
    assert layer.style != layers[0].style


WRAPPERS = [Linear, Named, Normed, OfParameters, Subclass, Kept]
SPLIT = {Linear: "base_layer", Named: "inner", Kept: "modules_to_save.default"}


def made(wrap: Callable[[nn.Linear], nn.Module]) -> MLP:
    torch.manual_seed(0)
    return MLP(wrap).double()


def loss_of(model: nn.Module, steps: int = 1) -> Tensor:
    x = torch.randn(3, 5, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    return model(x).square().sum()


def same_as_full(make: Callable[[], nn.Module], plan: dict[str, str] | None) -> None:
    """Compare loss and gradients of all that is trained."""
    full = make()
    expected = loss_of(full)
    expected.backward()

    def fn(rank: int) -> None:
        model = make()
        if plan is None:
            layers = automatic_plan(model, 2)
        else:
            layers = list(with_tried_wrappers(match_plan(model, plan), 2))
        split = SplitModel(model, layers, all_ranks())
        own = loss_of(model)
        torch.testing.assert_close(own, expected)
        own.backward()
        for (name, param), one in zip(model.named_parameters(), full.parameters(), strict=True):
            assert (param.grad is None) == (one.grad is None), name
            if param.grad is not None:
                torch.testing.assert_close(split.full(param, param.grad), one.grad, msg=name)
        split.restore()
        assert type(getattr(model, "up", model)) is type(getattr(full, "up", full))
        torch.testing.assert_close(loss_of(model), expected)

    run_ranks(fn, 2)


@pytest.mark.filterwarnings("ignore:.*around a linear layer that computes something else")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_that_a_plan_names_is_split(wrap: Any) -> None:
    """A wrapper that a plan names was refused as no linear layer."""
    same_as_full(lambda: made(wrap), PLAN)


@pytest.mark.parametrize("wrap", SPLIT)
def test_adapters_are_split_as_their_layer(wrap: Any) -> None:
    def fn(rank: int) -> dict[str, tuple[int, ...]]:
        model = made(wrap)
        SplitModel(model, list(with_tried_wrappers(match_plan(model, PLAN), 2)), all_ranks())
        return {name: tuple(param.shape) for name, param in model.named_parameters()}

    shapes = run_ranks(fn, 2)[0]
    assert shapes[f"up.{SPLIT[wrap]}.weight"] == (HIDDEN // 2, WIDTH)
    assert shapes[f"down.{SPLIT[wrap]}.weight"] == (WIDTH, HIDDEN // 2)
    if wrap is Linear:
        assert shapes["up.lora_A.default.weight"] == (RANK, WIDTH)
        assert shapes["up.lora_B.default.weight"] == (HIDDEN // 2, RANK)
        assert shapes["down.lora_A.default.weight"] == (RANK, HIDDEN // 2)
        assert shapes["down.lora_B.default.weight"] == (WIDTH, RANK)


def test_what_computes_something_else_in_parts_is_full_with_a_word() -> None:
    model = made(Normed)
    with pytest.warns(UserWarning, match="'up' is a Normed around a linear layer .* 1 others"):
        layers = list(with_tried_wrappers(match_plan(model, PLAN), 2))
    assert [layer.style.form for layer in layers] == ["unsplit", "unsplit"]


def test_an_automatic_plan_finds_layers_with_adapters() -> None:
    layers = automatic_plan(made(Linear), 2)
    assert {layer.name: layer.style.form for layer in layers} == {
        "up": "colwise",
        "down": "rowwise",
    }
    same_as_full(lambda: made(Linear), None)


def test_a_dropout_before_adapters_is_drawn_alike_on_all_ranks() -> None:
    """A dropout before adapters was drawn apart so that ranks parted ways."""

    def fn(rank: int) -> list[Tensor]:
        torch.manual_seed(5)
        model = made(lambda one: Linear(one, dropout=0.5))
        SplitModel(model, list(with_tried_wrappers(match_plan(model, PLAN), 2)), all_ranks())
        torch.manual_seed(7)
        loss_of(model).backward()
        loss_of(model).backward()
        kept = (model.up.lora_A["default"], model.down.lora_B["default"])
        return [one.weight.grad for one in kept]

    first, second = run_ranks(fn, 2)
    torch.testing.assert_close(first, second)


def test_what_is_no_wrapper_of_one_layer_is_refused() -> None:
    model = nn.ModuleDict({"block": made(lambda one: one)})
    with pytest.raises(ConfigError, match=r"it is a MLP; expected a linear layer.*Name the layers"):
        match_plan(model, {"block": "colwise"})


class Embedding(nn.Module):
    """Low-rank adapters of an embedding, which read a table of their own."""

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_embedding_A = nn.ParameterDict({"default": torch.randn(RANK, 12)})
        self.lora_embedding_B = nn.ParameterDict({"default": torch.randn(WIDTH, RANK)})

    def forward(self, x: Tensor) -> Tensor:
        table, up = self.lora_embedding_A["default"], self.lora_embedding_B["default"]
        return self.base_layer(x) + F.embedding(x, table.T) @ up.T


@pytest.mark.parametrize("wrap", [Embedding, Kept])
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
def test_a_wrapped_embedding_is_split(wrap: Any, style: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"table": wrap(nn.Embedding(12, WIDTH))}).double()

    ids = torch.arange(12).view(3, 4)
    expected = make()["table"](ids)

    def fn(rank: int) -> None:
        model = make()
        split = SplitModel(model, match_plan(model, {"table": style}), all_ranks())
        assert split.shardings
        torch.testing.assert_close(model["table"](ids), expected)

    run_ranks(fn, 2)
