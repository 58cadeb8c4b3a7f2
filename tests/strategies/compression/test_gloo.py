"""On two processes over Gloo, compressed training is what it is on ranks inside one process."""

import pytest

from lightning_shard.data_parallel.compression import COMPRESSORS, OneBit
from tests.processes import run_processes
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    Run,
    assert_bitwise_equal,
    build,
    ignore_upstream_warnings,
    ignoring,
    train,
)

pytestmark = ignoring()

CASES = [
    ("int8", "shard_ddp"),
    ("topk", "zero1"),
    ("powersgd", "zero2"),
    ("powersgd", "shard_ddp"),
    ("onebit", "zero1"),
    ("fp16", "zero2"),
]


def train_cases() -> list[Run]:
    """Train one case after the other; each process must call."""
    ignore_upstream_warnings()
    return [_train("gloo", *case) for case in CASES]


def _train(backend: str, compression: str, strategy: str) -> Run:
    choice = OneBit(warmup_steps=2) if compression == "onebit" else COMPRESSORS[compression]()
    made = STRATEGIES[strategy](backend=backend, bucket_mb=SMALL_BUCKET_MB, compression=choice)
    return train(build("gpt"), strategy=made, devices=2, max_steps=3)


@pytest.mark.slow
def test_gloo_trains_as_one_process_does() -> None:
    first, second = run_processes(train_cases, 2)
    for case, run, other in zip(CASES, first, second, strict=True):
        assert_bitwise_equal(run, other)
        inside = _train("in_process", *case)
        assert run.losses == pytest.approx(inside.losses, rel=1e-4), case
        assert run.norms == pytest.approx(inside.norms, rel=1e-3), case
