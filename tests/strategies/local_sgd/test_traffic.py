"""What local SGD sends, counted, and that it is the same training over Gloo."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
from torch.utils.data import DataLoader

from examples.train_gpt import GPT, Text
from lightning_shard import LocalSGDStrategy
from lightning_shard.backends.traffic import ring_share
from tests.processes import run_processes
from tests.strategies.local_sgd.local_training import (
    BATCH,
    OnRanks,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    slow_but,
    tiny_data,
    trainer_of,
    weights_of,
)
from tests.strategies.parity import ignore_upstream_warnings, ignoring, quiet_trainer

pytestmark = ignoring()


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
