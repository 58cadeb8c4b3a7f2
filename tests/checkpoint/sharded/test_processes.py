"""What processes have saved, over Gloo, shared memory or MPI, goes on in others, laid out anew."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoint.sharded.runs import LAYOUTS, NUM_STEPS, SAVED_AFTER, fit, saving
from tests.checkpoint.sharded.test_matrix import single_device
from tests.examples.commands import ignoring_advice
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies import parity

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")


class On(NamedTuple):
    """A layout, and the backend over which its ranks talk."""

    layout: str
    backend: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.layout}"

    def run(self, function: Any, **arguments: Any) -> Any:
        """Call a function on all ranks; return what the first returns."""
        number, told = int(self.layout.rpartition("-")[2]), {"on": self, **arguments}
        if self.backend == "in_process":
            return function(**told)
        run = run_mpi if self.backend == "mpi" else run_processes
        return run(function, number, timeout_seconds=250, **told)[0]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the Trainer."""
        number = int(self.layout.rpartition("-")[2])
        return {} if self.backend == "in_process" else {"devices": number}


def save(on: On, kind: str, folder: Path) -> Path:
    """As a rank: train, and return the checkpoint."""
    _ignore_warnings(on)
    strategy = LAYOUTS[on.layout](checkpoint_format=kind, backend=on.backend)
    return saving(strategy, folder, **on.options)


def go_on(on: On, path: Path) -> tuple[list[float], dict[str, Any]]:
    """As a rank: train to the end; return losses and the trained state."""
    _ignore_warnings(on)
    model = fit(LAYOUTS[on.layout](backend=on.backend), ckpt_path=path, **on.options)
    return model.losses, model.state_dict()


def _ignore_warnings(on: On) -> None:
    if on.backend != "in_process":
        parity.ignore_upstream_warnings()
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")


MPI = [pytest.mark.slow, pytest.mark.mpi]
CELLS = [
    pytest.param(On("zero2-2", "gloo"), "sharded", On("zero3-3", "in_process")),
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in (
            (On("zero1-3", "gloo"), "full", On("zero2-2", "gloo")),
            (On("pipeline-2", "gloo"), "sharded", On("zero3-3", "gloo")),
            (On("zero3-3", "gloo"), "sharded", On("tensor-4", "gloo")),
            (On("hybrid-8", "in_process"), "sharded", On("pipeline-2", "gloo")),
            (On("zero3-3", "shm"), "sharded", On("zero2-2", "shm")),
            (On("zero1-3", "gloo"), "full", On("zero3-3", "shm")),
            (On("tensor-4", "shm"), "full", On("shard_ddp-2", "gloo")),
        )
    ),
    *(
        pytest.param(*cell, marks=MPI)
        for cell in (
            (On("zero1-3", "mpi"), "sharded", On("zero2-2", "mpi")),
            (On("tensor-4", "mpi"), "sharded", On("zero3-3", "gloo")),
            (On("copies-4", "in_process"), "full", On("zero3-3", "mpi")),
        )
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "kind", "after"), CELLS, ids=str)
def test_resume_in_other_processes(before: On, kind: str, after: On, tmp_path: Path) -> None:
    expected = single_device()
    path = before.run(save, kind=kind, folder=tmp_path)
    assert path.is_dir() == (kind == "sharded")
    losses, state = after.run(go_on, path=path)
    assert len(losses) == NUM_STEPS - SAVED_AFTER
    torch.testing.assert_close(losses, expected.losses[SAVED_AFTER:], rtol=1e-5, atol=0)
    torch.testing.assert_close(state, expected.state_dict(), rtol=1e-5, atol=1e-6)
