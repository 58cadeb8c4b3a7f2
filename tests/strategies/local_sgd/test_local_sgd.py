"""Local SGD, DiLoCo and streaming fragments do what is written by hand; resuming, and bytes."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch.utils.data import DataLoader

from examples.train_gpt import GPT, Text
from lightning_shard import DDPStrategy, LocalSGDStrategy
from lightning_shard.backends.traffic import ring_share
from tests.processes import run_processes
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
    trainer_of,
    weights_of,
)
from tests.strategies.local_sgd.test_consensus import SaveAt
from tests.strategies.parity import (
    NUM_STEPS,
    assert_bitwise_equal,
    build,
    ignore_upstream_warnings,
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


OVERLAPPED = {"sync_every": 4, "overlap_steps": 2, "mixing": 0.0}
RULES: dict[str, dict[str, Any]] = {
    "average": OVERLAPPED,
    "diloco": OVERLAPPED | {"outer_optimizer": "nesterov"},
    "int8": OVERLAPPED | {"compression": "int8"},
}


def save(file: Path, way: str, step: int = 5) -> None:
    """Save after a step; at the fifth parameters travel."""
    data = TinyData(tiny_data(2 * BATCH * 12))
    trainer_of(2, 5, RULES[way], callbacks=[SaveAt(file, step)]).fit(Tiny(), datamodule=data)


def resumed(file: Path, way: str) -> Weights:
    module, data = Tiny(), TinyData(tiny_data(2 * BATCH * 12))
    trainer_of(2, 9, RULES[way]).fit(module, datamodule=data, ckpt_path=file)
    return weights_of(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("before", "after"), [("average", "diloco"), ("diloco", "average"), ("int8", "average")]
)
def test_what_travels_under_another_rule_is_not_taken_for_the_model(
    before: str, after: str, tmp_path: Path
) -> None:
    """Taken for values, differences made every parameter almost 0."""
    file, without = tmp_path / "five.ckpt", tmp_path / "without.ckpt"
    save(file, before)
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["lightning_shard"]["local_sgd"]["arriving"] = []
    torch.save(checkpoint, without)
    expected = resumed(without, after)
    sent = {"average": "values", "diloco": "changes", "int8": "changes"}
    message = f"while {sent[before]} of parameters were on .* this run sends {sent[after]}"
    with pytest.warns(UserWarning, match=message):
        got = resumed(file, after)
    assert_same_weights(got, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("before", "after", "save_at"),
    [("diloco", "int8", 5), ("diloco", "diloco", 5), ("diloco", "average", 3)],
)
def test_what_travels_is_left_out_only_where_it_cannot_be_read(
    before: str, after: str, save_at: int, tmp_path: Path
) -> None:
    file = tmp_path / "saved.ckpt"
    save(file, before, save_at)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The checkpoint was saved while")
        resumed(file, after)
    state = torch.load(file, weights_only=True)["lightning_shard"]["local_sgd"]
    assert bool(state["arriving"]) == (save_at == 5)


class SentBytes(L.Callback):
    """Bytes that this rank sends from the first step to the last one."""

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = trainer.strategy.collectives.traffic.total_bytes

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.sent = trainer.strategy.collectives.traffic.total_bytes - self.before


def sent_bytes(strategy: Any, num_steps: int) -> float:
    """Return the bytes per step of the example's GPT; they do not depend on the batch."""
    sent = SentBytes()
    data = Text(context=8, batch_size=1)
    data.setup("fit")
    loader = DataLoader(data.train_blocks, batch_size=1)
    options = {"max_steps": num_steps, "limit_val_batches": 0, "accumulate_grad_batches": 1}
    trainer = quiet_trainer(strategy=strategy, devices=2, callbacks=[sent], **options)
    trainer.fit(GPT(), loader)
    return sent.sent / num_steps


@pytest.mark.slow
@pytest.mark.parametrize("fragments", slow_but([1], [1, 4]))
def test_diloco_sends_a_fiftieth(fragments: int) -> None:
    """The whole of it: usage of parameters, counters and what else goes with a step, too."""
    diloco = LocalSGDStrategy(
        backend="in_process", sync_every=50, outer_optimizer="nesterov", fragments=fragments
    )
    dense, sparse = sent_bytes("shard_ddp_in_process", 2), sent_bytes(diloco, 50)
    assert 45 <= dense / sparse <= 51
    numel = sum(param.numel() for param in GPT().parameters())
    spare = 64 * fragments  # a few numbers each time that ranks meet
    assert sparse * 50 == pytest.approx(2 * ring_share(numel, 2) * 4, abs=spare)


@pytest.mark.slow
def test_compression_comes_on_top() -> None:
    options: dict[str, Any] = {"backend": "in_process", "sync_every": 5}
    dense = sent_bytes(LocalSGDStrategy(**options), 5)
    assert dense / sent_bytes(LocalSGDStrategy(**options, compression="int8"), 5) > 3.9


@pytest.mark.slow
def test_a_model_without_buffers_sends_nothing_between_meetings() -> None:
    assert sent_bytes(LocalSGDStrategy(backend="in_process", sync_every=50), 4) == 0


WAYS: list[dict[str, Any]] = [
    {"sync_every": 3, "warmup_steps": 2},
    {"sync_every": 4, "fragments": 2, "overlap_steps": 2, "outer_optimizer": "nesterov"},
    {"sync_every": 4, "outer_optimizer": "nesterov", "compression": "int8"},
]


def train_ways(backend: str) -> list[tuple[Weights, list[Weights]]]:
    """Train each way on two ranks; return this rank's weights at the end and after each step."""
    ignore_upstream_warnings()
    results = []
    for options in WAYS:
        module, steps = Tiny(), OnRanks()
        trainer = trainer_of(2, 10, options | {"backend": backend}, callbacks=[steps])
        trainer.fit(module, datamodule=TinyData(tiny_data(2 * BATCH * 10)))
        results.append((weights_of(module), steps.mine))
    return results


@pytest.mark.slow
def test_processes_over_gloo_train_as_ranks_in_one_process() -> None:
    ranks = run_processes(train_ways, 2, backend="gloo")
    expected = train_ways("in_process")
    for way in range(len(WAYS)):
        for weights, _ in (ranks[0][way], ranks[1][way]):
            assert_same_weights(weights, expected[way][0], rtol=1e-9, atol=1e-11)
        for mine, other in zip(ranks[0][way][1], expected[way][1], strict=True):
            assert_same_weights(mine, other, rtol=1e-9, atol=1e-11)
