"""Within a step on a real GPU the host waits where the GPU-like device waits, and nowhere else."""

import pytest

from tests.gpu.waits import REASONS_ON_GPUS, fit_on_gpu
from tests.gpu_like.__main__ import every_fit
from tests.gpu_like.fits import CASES, COUNTED
from tests.gpu_like.reasons import unexplained
from tests.gpu_like.test_steps import may_wait
from tests.processes import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STAGES = ("shard_ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
FITS = sorted({name.rpartition("/")[0] for name in every_fit()})


@pytest.mark.parametrize("name", FITS)
def test_ranks_that_share_a_gpu_wait_for_nothing_without_a_reason(name: str) -> None:
    strategy, precision = name.split("/")
    seen = fit_on_gpu(strategy, precision, "in_process")
    waits = [tuple(one) for one in seen.waits]
    assert seen.num_steps == len(COUNTED)
    assert unexplained(waits, len(COUNTED) * CASES[strategy].num_ranks, REASONS_ON_GPUS) == []
    if not may_wait(f"{name}/0"):
        assert waits == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", STAGES)
def test_a_rank_over_nccl_waits_for_nothing_without_a_reason(strategy: str, precision: str) -> None:
    arguments = {"name": strategy, "precision": precision, "backend": "nccl", "num_ranks": 1}
    (seen,) = run_processes(fit_on_gpu, 1, fresh=True, timeout_seconds=240, **arguments)
    assert seen.num_steps == len(COUNTED)
    assert unexplained(map(tuple, seen.waits), len(COUNTED), REASONS_ON_GPUS) == []
    if not may_wait(f"{strategy}/{precision}/0"):
        assert seen.waits == []
