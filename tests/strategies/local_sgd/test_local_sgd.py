"""Local SGD, DiLoCo and streaming fragments do what is written by hand."""

from typing import Any

import pytest

from lightning_shard import DDPStrategy, LocalSGDStrategy
from tests.strategies.local_sgd.local_training import (
    BATCH,
    ByHand,
    OnRanks,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    slow_but,
    tiny_data,
    train_tiny,
    weights_of,
)
from tests.strategies.parity import (
    NUM_STEPS,
    assert_bitwise_equal,
    build,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring()

# 12 and 14 elements
HALVES = [["network.0.weight"], ["network.0.bias", "network.2.weight", "network.2.bias"]]


def assert_way(way: OnRanks, step: int, expected: ByHand) -> None:
    """Compare every rank's parameters after a step."""
    for rank, copy in enumerate(expected.copies):
        assert_same_weights(way.of_ranks[rank][step], dict(copy.state_dict()))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parameters_are_averaged_every_few_steps(num_ranks: int) -> None:
    way, weights = train_tiny(num_ranks, 8, sync_every=3)
    expected = ByHand.of(num_ranks)
    for step in range(8):
        expected.step(step)
        if step in (2, 5):
            expected.average()
        assert_way(way, step, expected)
    expected.average()  # the last round is shorter
    assert_same_weights(weights, dict(expected.copies[0].state_dict()))


def test_diloco_takes_an_outer_nesterov_step() -> None:
    way, weights = train_tiny(2, 8, sync_every=3, outer_optimizer="nesterov")
    expected = ByHand.of(2)

    def meet() -> None:
        for name in expected.common:
            expected.set(name, expected.outer_step(name, expected.outer_gradient(name)))

    for step in range(8):
        expected.step(step)
        if step in (2, 5):
            meet()
        assert_way(way, step, expected)
    meet()
    assert_same_weights(weights, expected.common)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("mixing", [None, 0.0, 0.25])
def test_streaming_fragments_land_later(mixing: float | None) -> None:
    """From 1, fragment 0 begins after steps 2, 6, ..., fragment 1 after 4, 8; each takes a step."""
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "overlap_steps": 1}
    way, weights = train_tiny(3, 9, **options, mixing=mixing, outer_optimizer="nesterov")
    expected, keep = ByHand.of(3), 0.5 if mixing is None else mixing
    flying: Weights = {}
    for step in range(9):
        expected.step(step)
        for name, gradient in flying.items():
            expected.set(name, expected.outer_step(name, gradient), keep)
        begin = {1: HALVES[0], 3: HALVES[1], 5: HALVES[0], 7: HALVES[1]}.get(step, [])
        flying = {name: expected.outer_gradient(name) for name in begin}
        assert_way(way, step, expected)
    # The last round: fragment 1 has just landed, and has something to send if ranks kept something.
    for name in expected.common if keep else HALVES[0]:
        expected.outer_step(name, expected.outer_gradient(name))
    assert_same_weights(weights, expected.common)


def test_streaming_fragments_of_plain_averages() -> None:
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "overlap_steps": 2, "mixing": 0.3}
    way, _ = train_tiny(2, 7, **options)
    expected, flying = ByHand.of(2), {}
    for step in range(7):
        expected.step(step)
        for name, value in flying.pop(step, {}).items():
            expected.set(name, value, keep=0.3)
        begin = {1: HALVES[0], 3: HALVES[1], 5: HALVES[0]}.get(step, [])
        flying[step + 2] = {name: expected.mean(lambda own, name=name: own[name]) for name in begin}
        assert_way(way, step, expected)


@pytest.mark.parametrize("accumulate", slow_but([2], [1, 2]))
def test_meeting_after_each_step_of_plain_sgd_is_averaging_gradients(accumulate: int) -> None:
    data, weights = tiny_data(3 * BATCH * 8), []
    for strategy in (LocalSGDStrategy(backend="in_process", sync_every=1), "shard_ddp_in_process"):
        module = Tiny(momentum=0.0)
        trainer = quiet_trainer(
            strategy=strategy,
            devices=3,
            max_steps=-1,
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=None,
            limit_val_batches=0,
        )
        trainer.fit(module, datamodule=TinyData(data))
        weights.append(weights_of(module))
    assert_same_weights(*weights)


@pytest.mark.parametrize("model", slow_but(["conv"], ["gpt", "conv"]))
def test_the_warm_up_has_the_bits_of_averaged_gradients(model: str) -> None:
    """With clipping, accumulation, a schedule; conv has running statistics."""
    local = LocalSGDStrategy(backend="in_process", warmup_steps=NUM_STEPS, bucket_mb=0.001)
    replicated = DDPStrategy(backend="in_process", bucket_mb=0.001)
    assert_bitwise_equal(
        train(build(model), strategy=local, devices=2),
        train(build(model), strategy=replicated, devices=2),
    )


def test_post_local_sgd_parts_after_the_warm_up() -> None:
    way, _ = train_tiny(2, 7, warmup_steps=3, sync_every=2)
    expected = ByHand.of(2)
    for step in range(7):
        if step < 3:
            expected.step_together(step)
        else:
            expected.step(step)
        if step in (4, 6):
            expected.average()
        assert_way(way, step, expected)
