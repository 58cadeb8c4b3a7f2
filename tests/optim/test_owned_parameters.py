"""Optimizers of full matrices on parameters that lie full on one rank each."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.optim.elementwise import needs_full_parameters, why_not_elementwise
from lightning_shard.optim.owned_parameters import parameters_to_own
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.strategies.trainer.announcement import what_is_held
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.optim.test_sharded_optimizer import train
from tests.strategies.matrix_optimizers import (
    Muon,
    Shampoo,
    adafactor_of_transformers,
    orthogonalised,
)

STAGES = (1, 2, 3)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def attach(
    model: nn.Module, optimizer: Optimizer, stage: int
) -> tuple[DataParallelEngine, ShardedOptimizer]:
    ranks = all_ranks()
    options = EngineOptions(stage=stage, owned=parameters_to_own([optimizer], model))
    engine = DataParallelEngine(model, ranks, options)
    return engine, ShardedOptimizer(optimizer, engine)


def made(kind: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(2, 2))])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        (optim.Muon, True),
        (optim.Adafactor, True),
        (Shampoo, True),
        (optim.AdamW, False),
        (optim.SGD, False),
        (optim.LBFGS, False),  # sees one vector of all parameters
    ],
)
def test_a_trial_tells_who_needs_full_parameters(kind: Any, needs: bool) -> None:
    optimizer = made(kind)
    assert needs_full_parameters(optimizer, optimizer.param_groups[0]) is needs


def test_groups_are_tried_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight.requires_grad_(False)  # and no optimizer has it yet
    groups = [
        {"params": [model[0].weight], "use_muon": True},
        {"params": [model[0].bias, model[1].bias], "use_muon": False},
    ]
    assert parameters_to_own([Muon(groups)], model) == {model[0].weight, model[1].weight}
    assert parameters_to_own([optim.AdamW([model[0].weight])], model) == frozenset()


def test_transformers_adafactor_needs_full_parameters() -> None:
    optimizer = adafactor_of_transformers(nn.Linear(2, 2))
    assert needs_full_parameters(optimizer, optimizer.param_groups[0])


class Distributed(Muon):
    """As the usual third-party Muon for several processes, which shares out and gathers itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if index % dist.get_world_size() == dist.get_rank():
                    param.data.add_(param.grad)
                dist.broadcast(param.data, index % dist.get_world_size())


def test_an_optimizer_that_sends_messages_itself_is_not_tried() -> None:
    """An optimizer that sends messages itself hung in its trial."""
    optimizer = Distributed([{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
    assert not needs_full_parameters(optimizer, optimizer.param_groups[0])
    assert "sends messages between ranks itself" in str(why_not_elementwise(optimizer))


@pytest.mark.parametrize("stage", STAGES)
def test_state_lies_on_owners_alone(stage: int) -> None:
    expected = optim.Adafactor((alone := make_model()).parameters())
    train(alone, expected, None)

    def fn(rank: int) -> Any:
        model = make_model()
        optimizer = optim.Adafactor(model.parameters())
        engine, _ = attach(model, optimizer, stage)
        train(model, optimizer, engine)
        params = optimizer.param_groups[0]["params"]
        held = [index for index, param in enumerate(params) if optimizer.state.get(param)]
        return held, full_state_dict(optimizer, engine)

    (first, state), (second, _), (third, _) = run_ranks(fn, 3)
    assert sorted([*first, *second, *third]) == list(range(6))
    assert max(map(len, (first, second, third))) < 6
    torch.testing.assert_close(state["state"], expected.state_dict()["state"])


def test_state_of_matrices_is_announced_as_it_will_be() -> None:
    """State of matrices was announced as if they were vectors."""

    def fn(rank: int) -> tuple[str, ...]:
        model = make_model()
        optimizer = optim.Adafactor(model.parameters())
        engine, _ = attach(model, optimizer, 2)
        return what_is_held(engine, [optimizer])[1]

    assert run_ranks(fn, 2) == [("Adafactor",)] * 2  # rows and columns: no trial tells their size


class Fails(Muon):
    """A step raises half-way, as running out of memory would."""

    fails = False

    def _muon(self, grad: Any, state: Any) -> Any:
        if self.fails:
            raise ValueError("on purpose")
        return super()._muon(grad, state)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_leaves_the_optimizer_all_of_its_parameters(stage: int) -> None:
    """A failed step left the optimizer without other ranks' parameters."""

    def fn(rank: int) -> None:
        model = make_model()
        matrices = [param for param in model.parameters() if param.ndim == 2]
        optimizer = Fails([{"params": matrices, "use_muon": True}])
        engine, sharded = attach(model, optimizer, stage)
        optimizer.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            train(model, optimizer, engine)
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 3
        sharded.detach()
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, matrices))

    run_ranks(fn, 2)


class Careless(Optimizer):
    """Assigns new tensors, and clears gradients by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data = param.data - 0.1 * orthogonalised(param.grad, torch.float64)
                param.grad = None


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_tensors_that_an_optimizer_assigns_are_the_parameters(stage: int) -> None:
    def run(stage: int | None) -> list[torch.Tensor]:
        model = make_model()
        optimizer = Careless([param for param in model.parameters() if param.ndim == 2])
        engine = None if stage is None else attach(model, optimizer, stage)[0]
        train(model, optimizer, engine)
        if engine is not None:
            engine.detach(restore=True)
        return [param.detach().clone() for param in model.parameters()]

    for got in run_ranks(lambda rank: run(stage), 2):
        torch.testing.assert_close(got, run(None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_may_be_added_that_no_optimizer_had(stage: int) -> None:
    def fn(rank: int) -> None:
        model = make_model()
        head, body = list(model[4].parameters()), [model[0].weight, model[2].weight]
        optimizer = optim.Adafactor(body)
        engine, _ = attach(model, optimizer, stage)
        optimizer.add_param_group({"params": head})
        train(model, optimizer, engine)
        assert engine.owner(head[0])[0].is_owned

    run_ranks(fn, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_an_elementwise_optimizer_cannot_be_added(stage: int) -> None:
    def fn(rank: int) -> None:
        model = make_model()
        adam = optim.AdamW(model[4].parameters())
        muon = optim.Muon([model[0].weight])
        ranks = all_ranks()
        options = EngineOptions(stage=stage, owned=parameters_to_own([adam, muon], model))
        engine = DataParallelEngine(model, ranks, options)
        ShardedOptimizer(adam, engine)
        ShardedOptimizer(muon, engine)
        muon.add_param_group({"params": [model[4].weight]})
        train(model, muon, engine)

    with pytest.raises(ConfigError, match=r"Muon was given '4.weight' in the middle of the fit"):
        run_ranks(fn, 2)
