"""Asynchronous SGD on real processes, Gloo's and MPI's, and on a GPU."""

import contextlib
import os
import signal
import time
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor

from lightning_shard import AsyncSGDStrategy
from lightning_shard.data_parallel.async_sgd.async_sgd import AsyncCounters
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.async_sgd.test_async_sgd import (
    Failing,
    Seen,
    SlowRank,
    Validated,
    WithValidation,
    tiny_run,
    trainer_of,
)
from tests.strategies.local_sgd.local_training import Tiny, Weights, assert_same_weights, weights_of
from tests.strategies.parity import ignore_upstream_warnings, ignoring

pytestmark = ignoring()


def train_real(backend: str, **trainer: Any) -> tuple[Weights, AsyncCounters, list[Weights]]:
    ignore_upstream_warnings()
    torch.manual_seed(7)
    module, seen = Validated(), Seen()
    strategy = AsyncSGDStrategy(backend=backend, staleness_bound=2, timeout=60)
    options = {"limit_val_batches": 1, "val_check_interval": 5, "callbacks": [seen]}
    run = trainer_of(3, 20, 2, strategy=strategy, max_epochs=2, **(options | trainer))
    run.fit(module, datamodule=WithValidation(module, 5))
    for ranks in seen.of_ranks:
        for weights in ranks:
            assert_same_weights(weights, ranks[0], rtol=0, atol=0)
    return weights_of(module), seen.counters[run.global_rank], seen.of_ranks[-1]


def check_real(results: list[Any]) -> None:
    for weights, counters, _ in results:
        assert_same_weights(weights, results[0][0], rtol=0, atol=0)
        assert (counters.steps, counters.gradients) == (20, 60)
        assert counters.max_staleness <= 2


@pytest.mark.slow
def test_gloo() -> None:
    check_real(run_processes(train_real, 3, backend="gloo"))


@pytest.mark.slow
def test_over_shared_memory() -> None:
    check_real(run_processes(train_real, 3, backend="shm"))


@pytest.mark.slow
def test_every_process_hears_of_a_failure() -> None:
    """With the comparison of collectives on; messages between two ranks pass it by."""
    for rank, text in enumerate(run_processes(fail_real, 3)):
        assert "a batch that cannot be" in text
        assert rank == 1 or "rank 1" in text


def fail_real() -> str:
    ignore_upstream_warnings()
    strategy = AsyncSGDStrategy(backend="gloo", staleness_bound=2, timeout=60, debug=True)
    try:
        trainer_of(3, 9, 2, strategy=strategy).fit(Failing(), datamodule=tiny_run(3, 9))
    except Exception as error:
        return str(error)
    return ""


class Terminated(Tiny):
    """One rank is told to end, early in a long training."""

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        time.sleep(0.02)
        if self.global_rank == 1 and self.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch)


class AtTheEnd(L.Callback):
    weights: Weights | None = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights = weights_of(pl_module)


def terminate_real() -> tuple[Weights | None, int]:
    ignore_upstream_warnings()
    strategy = AsyncSGDStrategy(backend="gloo", staleness_bound=3, timeout=60)
    end = AtTheEnd()
    trainer = trainer_of(3, 1000, 3, strategy=strategy, callbacks=[end], max_epochs=1000)
    with contextlib.suppress(Exception, SystemExit):
        trainer.fit(Terminated(), datamodule=tiny_run(3, 10))
    return end.weights, trainer.global_step


@pytest.mark.slow
def test_ranks_that_stop_together_hold_the_same() -> None:
    results = run_processes(terminate_real, 3)
    steps = {step for _, step in results}
    assert len(steps) == 1
    assert max(steps) < 1000
    first = results[0][0]
    assert first is not None
    for weights, _ in results:
        assert_same_weights(weights, first, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parameters_on_a_gpu_travel_through_the_host() -> None:
    module, seen = Tiny(), Seen()
    strategy = AsyncSGDStrategy(backend="in_process", staleness_bound=2, num_ranks=3)
    more = {"accelerator": "gpu", "callbacks": [SlowRank(), seen], "strategy": strategy}
    trainer_of(1, 10, 2, **more).fit(module, datamodule=tiny_run(3, 10))
    on_cpu = Tiny()
    trainer_of(3, 10, 2, callbacks=[SlowRank()]).fit(on_cpu, datamodule=tiny_run(3, 10))
    cpu_weights = {name: value.cpu() for name, value in weights_of(module).items()}
    assert_same_weights(cpu_weights, weights_of(on_cpu), rtol=1e-9)
    assert {counters.gradients for counters in seen.counters} == {30}


@pytest.mark.slow
@pytest.mark.mpi
def test_mpi() -> None:
    check_real(run_mpi(train_real, 3, backend="mpi"))
