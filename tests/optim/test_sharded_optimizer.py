"""The user's own optimizer object on shards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import full_state_dict, local_state_dict
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.one_step import forward_and_backward
from tests.groups import engine_of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def train(
    model: nn.Module, optimizer: Optimizer, engine: DataParallelEngine | None, num_steps: int = 3
) -> None:
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        forward_and_backward(engine, lambda: model(x).square().mean())
        optimizer.step()


def alone(name: str, num_steps: int = 3) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, None, num_steps)
    return model, optimizer


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got["state"], expected["state"], rtol=1e-5, atol=1e-7)
    assert got["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", range(4))
def test_weights_and_joined_state_equal_a_single_devices(name: str, stage: int) -> None:
    expected_model, expected = alone(name)

    def fn(rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        engine = engine_of(model, stage=stage)
        ShardedOptimizer(optimizer, engine)
        train(model, optimizer, engine)
        state = full_state_dict(optimizer, engine)
        engine.detach(restore=True)
        return state, model.state_dict()

    first, second = (result for result in run_ranks(fn, 2) if result is not None)
    assert_same_state(first[0], expected.state_dict())
    assert second[0] == {}
    torch.testing.assert_close(first[1], dict(expected_model.state_dict()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", range(4))
def test_state_of_a_single_device_is_cut_and_joined(name: str, stage: int) -> None:
    _, before = alone(name)
    saved = before.state_dict()

    def fn(rank: int) -> dict[str, Any]:
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        engine = engine_of(model, stage=stage)
        ShardedOptimizer(optimizer, engine)
        local = local_state_dict(saved, optimizer, engine)
        with engine.optimizer_view():
            optimizer.load_state_dict(local)
        return full_state_dict(optimizer, engine)

    assert_same_state(run_ranks(fn, 3)[0] or {}, saved)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
@pytest.mark.parametrize("stage", range(4))
def test_counters_go_on_after_a_resume(name: str, stage: int) -> None:
    _, before = alone(name)
    saved = before.state_dict()

    def fn(rank: int) -> set[float]:
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        engine = engine_of(model, stage=stage)
        ShardedOptimizer(optimizer, engine)
        local = local_state_dict(copy.deepcopy(saved), optimizer, engine)
        with engine.optimizer_view():
            optimizer.load_state_dict(local)
        train(model, optimizer, engine, 2)
        state = full_state_dict(optimizer, engine).get("state", {})
        return {entries["step"].item() for entries in state.values()}

    assert run_ranks(fn, 3)[0] == {5.0}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_made_in_init_is_cut(stage: int) -> None:
    def fn(rank: int) -> int:
        model = make_model()
        optimizer = OPTIMIZERS["Adagrad"](model.parameters())
        ShardedOptimizer(optimizer, engine_of(model, stage=stage))
        return sum(state["sum"].numel() for state in optimizer.state.values())

    sizes = [size or 0 for size in run_ranks(fn, 2)]
    assert sum(sizes) == sum(param.numel() for param in make_model().parameters())
    assert max(sizes) < sum(sizes)


@pytest.mark.parametrize("stage", range(4))
def test_groups_added_later(stage: int) -> None:
    def run(start: Callable[[nn.Module], DataParallelEngine | None]) -> dict[str, Tensor]:
        model = make_model()
        optimizer = optim.Adam(model[0].parameters(), lr=0.1)
        engine = start(model)
        if engine is not None:
            ShardedOptimizer(optimizer, engine)
        train(model, optimizer, engine, 2)
        model.zero_grad()
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})
        train(model, optimizer, engine, 2)
        if engine is not None:
            engine.detach(restore=True)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    expected = run(lambda model: None)
    for result in run_ranks(lambda rank: run(lambda model: engine_of(model, stage=stage)), 2):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_a_scheduler_holds_the_same_object() -> None:
    def fn(rank: int) -> list[float]:
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine = engine_of(model, stage=2)
        sharded = ShardedOptimizer(optimizer, engine)
        assert sharded.optimizer is optimizer is scheduler.optimizer
        rates = []
        for _ in range(2):
            train(model, optimizer, engine, 1)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert run_ranks(fn, 2) == [[0.5, 0.25]] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_zero_grad(stage: int, set_to_none: bool) -> None:
    def fn(rank: int) -> list[float | None]:
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        engine = engine_of(model, stage=stage)
        ShardedOptimizer(optimizer, engine)
        with engine.step():
            loss = model(torch.ones(1, 3)).sum()
        with engine.backward():
            loss.backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        with engine.optimizer_view():
            grads = [param.grad for param in model.parameters() if param.numel()]
        return [None if grad is None else grad.abs().max().item() for grad in grads]

    expected = {None} if set_to_none else {0.0}
    for seen in run_ranks(fn, 2):
        assert set(seen or ()) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor, optim.Muon])
def test_optimizers_of_full_matrices_are_refused(stage: int, kind: Any) -> None:
    def fn(rank: int) -> None:
        model = nn.Linear(3, 3, bias=False)
        ShardedOptimizer(kind(model.parameters()), engine_of(model, stage=stage))

    with pytest.raises(ConfigError, match=rf"{kind.__name__} does not .* stage {stage}.*shard_ddp"):
        run_ranks(fn, 2)


def test_detach_gives_the_optimizer_back() -> None:
    def fn(rank: int) -> None:
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        engine = engine_of(model, stage=2)
        sharded = ShardedOptimizer(optimizer, engine)
        train(model, optimizer, engine, 1)
        engine.detach(restore=True)
        sharded.detach()
        assert "zero_grad" not in vars(optimizer)
        assert not optimizer._optimizer_step_pre_hooks
        train(model, optimizer, None, 1)

    run_ranks(fn, 2)


class OfAnother(optim.SGD):
    """An optimizer whose step calls that of its base class, and goes on with the state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for param, state in self.state.items():
            param.sub_(state["momentum_buffer"], alpha=0.01)
        return loss


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_calls_that_of_its_base_class_leaves_parameters_full(
    stage: int, with_closure: bool
) -> None:
    """Once the base class was used itself, torch calls the hooks of a step in both."""
    optim.SGD(make_model().parameters(), lr=0.1).zero_grad()

    def run(start: Callable[[nn.Module], DataParallelEngine | None]) -> dict[str, Tensor]:
        model = make_model()
        optimizer = OfAnother(model.parameters(), lr=0.1, momentum=0.9)
        engine = start(model)
        if engine is not None:
            ShardedOptimizer(optimizer, engine)
        for _ in range(2):
            if not with_closure:
                train(model, optimizer, engine, 1)
                continue
            own_step = optimizer.step
            optimizer.step = lambda: None  # type: ignore[method-assign,assignment,return-value]
            closure = lambda: train(model, optimizer, engine, 1)  # noqa: E731
            own_step(closure)
            optimizer.step = own_step  # type: ignore[method-assign]
        if engine is not None:
            engine.detach(restore=True)
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = run(lambda _: None)
    for got in run_ranks(lambda _: run(lambda model: engine_of(model, stage=stage)), 2):
        assert got is not None
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
