"""On two processes over Gloo, ranks that share experts train as a single device does."""

import pytest

from tests.processes import run_processes
from tests.strategies.expert_parallel.test_expert_parallel import sharing
from tests.strategies.expert_parallel.test_parity import build, single_device
from tests.strategies.parity import (
    LONG_STEPS,
    SMALL_BUCKET_MB,
    Run,
    assert_parity,
    ignore_upstream_warnings,
    ignoring,
    train,
)

pytestmark = ignoring()


def trained_by_processes() -> list[Run]:
    ignore_upstream_warnings()
    return [
        train(
            build(name),
            strategy=sharing(backend="gloo", zero_stage=2, bucket_mb=SMALL_BUCKET_MB),
            devices=2,
            num_steps=LONG_STEPS,
        )
        for name in ("mixtral", "seldom")
    ]


@pytest.mark.slow
def test_two_processes_over_gloo_equal_a_single_device() -> None:
    runs = run_processes(trained_by_processes, 2)[0]
    for name, run in zip(("mixtral", "seldom"), runs, strict=True):
        assert_parity(run, single_device(name), num_steps=LONG_STEPS)
