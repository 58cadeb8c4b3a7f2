"""Under Fabric every stage trains as under a Trainer: the same engine, another adapter."""

import pytest

from tests.fabric.loops import NUM_STEPS, assert_same, run_of, strategy_of
from tests.strategies.parity import STRATEGIES, Case, ignoring, train_ranks

pytestmark = ignoring()


def trainers(name: str, model: str, num_ranks: int = 2, precision: str = "32-true"):
    return train_ranks(
        Case(
            model=model,
            strategy=name,
            num_ranks=num_ranks,
            precision=precision,
            num_steps=NUM_STEPS,
        )
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_20_steps_equal_the_trainers(strategy: str) -> None:
    run = run_of(strategy_of(strategy), "gpt")
    assert_same(run, trainers(strategy, "gpt"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["conv", "lstm", "mixture", "gpt2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_models_equal_the_trainers(strategy: str, model: str) -> None:
    run = run_of(strategy_of(strategy), model, devices=3)
    assert_same(run, trainers(strategy, model, num_ranks=3))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_a_module_and_its_optimizer_may_be_set_up_apart(strategy: str) -> None:
    run = run_of(strategy_of(strategy), "gpt", num_steps=4, jointly=False)
    assert_same(run, run_of(strategy_of(strategy), "gpt", num_steps=4), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_precisions_equal_the_trainers(strategy: str, precision: str) -> None:
    run = run_of(strategy_of(strategy), "gpt", precision=precision)
    assert_same(run, trainers(strategy, "gpt", precision=precision))
