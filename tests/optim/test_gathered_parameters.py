"""An optimizer of full matrices on layers in parts: what an owner gathers, and what it sends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import replicated
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.optim import owned_parameters
from lightning_shard.optim.owned_parameters import parameters_to_own
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.strategies.trainer.announcement import what_is_held
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.optim.test_owned_parameters import Careless, Fails
from tests.optim.test_sharded_optimizer import train
from tests.strategies.matrix_optimizers import Muon

PLAN = {"0": "colwise", "2": "rowwise"}
SPLIT = (8 * 3, 8, 8 * 4)  # a matrix, its bias, a matrix; the other bias is full on both ranks
Make = Callable[[nn.Module], Optimizer]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh()).double()


class Rank:
    """A model in two parts, its engine and its optimizer on one of two ranks."""

    def __init__(self, make: Make, model: nn.Module | None = None, stage: int = 0) -> None:
        self.model = make_model() if model is None else model
        self.optimizer = make(self.model)
        owned = parameters_to_own([self.optimizer], self.model)
        self.ranks = all_ranks()
        alone = dist.new_group([self.ranks.rank], use_local_synchronization=True)
        self.split = SplitModel(self.model, match_plan(self.model, PLAN), self.ranks)
        options = EngineOptions(stage=stage, owned=owned)
        collectives = get_backend("in_process").collectives(alone)
        self.engine = DataParallelEngine(self.model, collectives, options, split=self.split)
        self.sharded = ShardedOptimizer(self.optimizer, self.engine)

    def train(self, num_steps: int = 3) -> None:
        train(self.model, self.optimizer, self.engine, num_steps)

    def weights(self) -> list[Tensor]:
        """Return the full weights, at the end."""
        self.engine.detach(restore=True)
        self.split.restore()
        return [param.detach().clone() for param in self.model.parameters()]


@pytest.fixture(autouse=True)
def _in_double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def trained_alone(make: Make, model: nn.Module | None = None) -> list[Tensor]:
    model = make_model() if model is None else model
    train(model, make(model), None)
    return [param.detach().clone() for param in model.parameters()]


def assert_same(make: Make, **options: Any) -> None:
    def fn(rank: int) -> list[Tensor]:
        made = Rank(make, **options)
        made.train()
        return made.weights()

    for got in run_ranks(fn, 2):
        torch.testing.assert_close(got, trained_alone(make), rtol=1e-9, atol=1e-12)


def adafactor(model: nn.Module) -> Optimizer:
    return optim.Adafactor(model.parameters(), lr=0.1)


def careless(model: nn.Module) -> Optimizer:
    return Careless([param for param in model.parameters() if param.ndim == 2])


def muon_and_adam(model: nn.Module) -> Optimizer:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    return Muon([{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}])


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("make", [adafactor, careless, muon_and_adam])
def test_a_step_is_a_single_devices(make: Make, stage: int) -> None:
    """Careless assigns new tensors to its parameters, and takes their gradients away."""
    assert_same(make, stage=stage)


@pytest.mark.parametrize("num_bytes", [0, 300])
def test_small_messages_bring_the_same(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_parameters, "_MESSAGE_BYTES", num_bytes)
    assert_same(adafactor)


def test_each_part_travels_once_and_its_gradient_and_its_update() -> None:
    def fn(rank: int) -> tuple[int, int]:
        made = Rank(adafactor)
        made.train(1)
        before = made.ranks.traffic.snapshot()["all_to_all"]
        made.train(1)
        after = made.ranks.traffic.snapshot()["all_to_all"]
        return after.calls - before.calls, after.elements - before.elements

    (calls, first), (_, second) = run_ranks(fn, 2)  # type: ignore[misc]
    assert calls == 2
    assert first + second == 3 * sum(SPLIT) // 2 + 4


def test_elementwise_groups_stay_in_parts() -> None:
    def fn(rank: int) -> tuple[list[int], list[int]]:
        made = Rank(muon_and_adam)
        made.train(2)
        state = {id(p): one for p, one in made.optimizer.state.items() if one}
        params = list(made.model.parameters())
        found = [
            [sum(v.numel() for v in state[id(p)].values() if isinstance(v, Tensor))]
            if id(p) in state
            else [0]
            for p in params
        ]
        shown = [len(group["params"]) for group in made.optimizer.param_groups]
        return [one for (one,) in found], shown

    (first, shown), (second, _) = run_ranks(fn, 2)  # type: ignore[misc]
    assert shown == [2, 2]
    assert sorted([(first[0], second[0]), (first[2], second[2])]) == [(0, 24), (32, 0)]  # full
    assert [first[1], second[1]] == [8, 8]  # two values for each of four
    assert [first[3], second[3]] == [8, 8]  # full on both


def test_what_is_held_is_told_in_full() -> None:
    """What is held was told as if it lay in parts."""

    def of_matrices(model: nn.Module) -> Optimizer:
        return optim.Muon([param for param in model.parameters() if param.ndim == 2])

    def fn(rank: int) -> tuple[int, int, int]:
        made = Rank(of_matrices)
        expected = what_is_held(made.engine, [made.optimizer])[0].optimizer_state
        made.train(1)
        state = sum(v.nbytes for one in made.optimizer.state.values() for v in one.values())
        return expected, state, replicated(made.engine, [made.optimizer]).optimizer_state

    both = 8 * (SPLIT[0] + SPLIT[2])
    found = run_ranks(fn, 2)
    assert sorted(found) == [(192, 192, both), (256, 256, both)]  # type: ignore[type-var]


def test_a_parameter_without_gradients_decays_as_on_a_single_device() -> None:
    """The usual third-party Muon gives it a gradient of zeros."""

    def make(model: nn.Module) -> Optimizer:
        matrices = [param for param in model.parameters() if param.ndim == 2]
        return Muon([{"params": matrices, "use_muon": True, "weight_decay": 0.5}])

    def frozen() -> nn.Module:
        model = make_model()
        model[0].requires_grad_(False)
        return model

    def fn(rank: int) -> list[Tensor]:
        made = Rank(make, frozen())
        made.train()
        return made.weights()

    expected = trained_alone(make, frozen())
    assert not torch.equal(expected[0], make_model()[0].weight)
    for got in run_ranks(fn, 2):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_failed_step_leaves_parts_and_groups_as_they_were() -> None:
    def make(model: nn.Module) -> Optimizer:
        matrices = [param for param in model.parameters() if param.ndim == 2]
        return Fails([{"params": matrices, "use_muon": True}])

    def fn(rank: int) -> None:
        made = Rank(make)
        shapes = [param.shape for param in made.model.parameters()]
        made.optimizer.fails = True  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="on purpose"):
            made.train()
        assert len(made.optimizer.state_dict()["param_groups"][0]["params"]) == 2
        assert [param.shape for param in made.model.parameters()] == shapes

    run_ranks(fn, 2)


def test_a_parameter_of_an_elementwise_optimizer_cannot_be_added() -> None:
    def fn(rank: int) -> None:
        model = make_model()
        adam = optim.AdamW([model[0].weight])
        made = Rank(lambda model: optim.Muon([model[2].weight]), model)  # type: ignore[index]
        made.engine.options.__dict__["owned"] = frozenset([model[2].weight])  # as if adam had been
        made.optimizer.add_param_group({"params": [adam.param_groups[0]["params"][0]]})
        made.train()

    with pytest.raises(ConfigError, match=r"Muon was given '0.weight' in the middle of the fit"):
        run_ranks(fn, 2)


def test_lbfgs_is_still_refused() -> None:
    message = "LBFGS does not update each element by itself, but tensor parallel gives each rank"
    with pytest.raises(ConfigError, match=message):
        run_ranks(lambda rank: Rank(lambda model: optim.LBFGS(model.parameters())), 2)
