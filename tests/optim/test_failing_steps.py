"""A step of an optimizer that raises, and is caught, leaves the model as a single device does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_shard.errors import ConfigError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer, WatchedSteps
from lightning_shard.testing import run_ranks
from tests.data_parallel.test_odd_times import batches
from tests.groups import engine_of

NUM_RANKS = 2
Failure = type[BaseException]


class Fragile(SGD):
    """Updates, or half of it, and raises as it is told."""

    failure: BaseException | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.failure is None:
            return super().step(closure)
        for group in self.param_groups:
            for param in group["params"][:2]:
                param.mul_(0.5)
        failure, self.failure = self.failure, None
        raise failure


def build() -> tuple[nn.Sequential, Fragile]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    return model, Fragile(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: Fragile, backward: Callable[[int], None], failure: Failure
) -> list[Tensor]:
    """Train for three steps, of which the second fails; return the weights as they are then."""
    backward(0)
    optimizer.step()
    optimizer.zero_grad()
    backward(1)
    optimizer.failure = failure("mine")
    with pytest.raises(failure, match="mine"):
        optimizer.step()
    if failure is ValueError:
        seen = [param.detach().clone() for param in model.parameters()]
    optimizer.zero_grad()
    backward(2)
    if failure is not ValueError:
        seen = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    return seen


def on_ranks(
    fn: Callable[[int, nn.Module, Fragile, Callable[[int], None]], Any], stage: int
) -> dict[str, Tensor]:
    """Run on several ranks; return the first one's weights."""

    def run(rank: int) -> dict[str, Tensor]:
        model, optimizer = build()
        engine = engine_of(model, stage=stage, bucket_mb=1e-5)
        sharded = ShardedOptimizer(optimizer, engine)

        def backward(number: int) -> None:
            with engine.step():
                loss = model(batches(number)[rank]).square().mean()
                with engine.backward():
                    loss.backward()

        fn(rank, model, optimizer, backward)
        sharded.detach()
        engine.detach(restore=True)
        return {name: value.clone() for name, value in model.state_dict().items()}

    results = run_ranks(run, NUM_RANKS)
    assert results[0] is not None
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    return results[0]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_raises_leaves_parameters_full(stage: int, failure: Failure) -> None:
    """A step that raised left parameters in shards."""
    shapes = []

    def fn(_: int, model: nn.Module, optimizer: Fragile, backward: Callable[[int], None]) -> None:
        seen = train(model, optimizer, backward, failure)
        shapes.append([tuple(one.shape) for one in seen])

    got = on_ranks(fn, stage)

    model, optimizer = build()

    def backward(number: int) -> None:
        losses = [model(batch).square().mean() for batch in batches(number)]
        (sum(losses) / NUM_RANKS).backward()  # type: ignore[union-attr]

    expected = train(model, optimizer, backward, failure)
    torch.testing.assert_close(got, model.state_dict(), rtol=1e-9, atol=1e-12)
    if stage < 3:
        assert shapes == [[tuple(one.shape) for one in expected]] * NUM_RANKS


@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_raises_on_one_rank_alone_ends_all(stage: int) -> None:
    """The other ranks had updated theirs: a state that no single device can be in."""

    def fn(
        rank: int, model: nn.Module, optimizer: Fragile, backward: Callable[[int], None]
    ) -> None:
        backward(0)
        if rank == 1:
            optimizer.failure = ValueError("mine")
        try:
            optimizer.step()
        except ValueError:
            assert rank == 1
        optimizer.zero_grad()
        backward(1)

    with pytest.raises(ConfigError, match="did not raise on every rank"):
        on_ranks(fn, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_refused_leaves_the_model_full(stage: int) -> None:
    """One in the last layer was found when the first layers showed shards."""

    def fn(_: int, model: nn.Module, optimizer: Fragile, backward: Callable[[int], None]) -> None:
        backward(0)
        layers: Any = model
        biases = [layers[0].bias, layers[1].bias]
        shapes = [param.shape for param in model.parameters()]
        kept = biases[1].grad
        biases[1].grad = biases[0].grad * 2
        with pytest.raises(ConfigError, match=r"gradient of '0\.bias'"):
            optimizer.step()
        assert [param.shape for param in model.parameters()] == shapes
        biases[1].grad = kept
        optimizer.step()

    got = on_ranks(fn, stage)
    model, optimizer = build()
    losses = [model(batch).square().mean() for batch in batches(0)]
    (sum(losses) / NUM_RANKS).backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.testing.assert_close(got, model.state_dict(), rtol=1e-9, atol=1e-12)


def test_the_step_is_the_optimizers_own_again_and_schedulers_may_wrap_it() -> None:
    _, optimizer = build()
    seen: list[str] = []

    def watch(one: Optimizer) -> WatchedSteps:
        return WatchedSteps(one, lambda: seen.append("now"), lambda: seen.append("later"))

    watching = watch(optimizer)
    StepLR(optimizer, 1)
    optimizer.failure = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        optimizer.step()
    optimizer.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert seen == ["now", "later"]
    watching.detach()
    optimizer.failure = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        optimizer.step()
    assert seen == ["now", "later"]

    _, optimizer = build()
    scheduler = StepLR(optimizer, 1)
    watching = watch(optimizer)
    assert "step" not in vars(copy.deepcopy(optimizer))
    optimizer.step()
    scheduler.step()  # torch warns where it finds a step that is not its own
    watching.detach()
    assert optimizer.step._wrapped_by_lr_sched  # type: ignore[attr-defined]
    assert watching._ours not in vars(optimizer).values()
