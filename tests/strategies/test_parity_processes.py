"""Over shared memory and under mpirun, every stage trains as a single device does."""

import warnings
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_shard import ZeRO2Strategy
from lightning_shard.backends.shm import backend as shm_backend
from tests.mpirun import run_mpi
from tests.processes import rank_and_world_size, run_processes
from tests.strategies.parity import (
    STRATEGIES,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    ignoring,
    single_device,
    train_cases,
)

pytestmark = ignoring()

SLOW, MPI = pytest.mark.slow, pytest.mark.mpi
Runs = list[tuple[Case, list[Run]]]


def of_each_stage(num_ranks: int) -> list[Case]:
    return [Case(model="gpt", strategy=one, num_ranks=num_ranks) for one in STRATEGIES]


IN_BF16 = [Case(model="lstm", strategy="zero3", num_ranks=3, precision="bf16-mixed")]
QUICK = [Case(model="gpt", strategy="zero3", num_ranks=2)]
ON_THREE = {
    "shm": [
        Case(model="gpt", strategy="zero3", num_ranks=3),
        Case(model="mixture", strategy="zero2", num_ranks=3),
        Case(model="sync_conv", strategy="zero1", num_ranks=3),
    ],
    "mpi": [
        Case(model="gpt", strategy="zero3", num_ranks=3),
        Case(model="sync_conv", strategy="zero2", num_ranks=3),
    ],
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("shm", of_each_stage(2)), id="shm, every stage"),
        pytest.param(("shm", ON_THREE["shm"]), id="shm, three ranks", marks=SLOW),
        pytest.param(("shm", IN_BF16), id="shm, bf16-mixed", marks=SLOW),
        pytest.param(("mpi", QUICK), id="mpi, two ranks", marks=MPI),
        pytest.param(("mpi", ON_THREE["mpi"]), id="mpi, three ranks", marks=[MPI, SLOW]),
        pytest.param(("mpi", of_each_stage(2)), id="mpi, every stage", marks=[MPI, SLOW]),
        pytest.param(("mpi", IN_BF16), id="mpi, bf16-mixed", marks=[MPI, SLOW]),
    ],
)
def runs(request: pytest.FixtureRequest) -> Runs:
    """What each rank makes of each case, one after the other in the same processes."""
    backend, cases = request.param
    start = run_mpi if backend == "mpi" else run_processes
    of_ranks = start(train_cases, cases[0].num_ranks, cases=cases, backend=backend)
    return list(zip(cases, map(list, zip(*of_ranks, strict=True)), strict=True))


def test_equals_a_single_device(runs: Runs) -> None:
    for case, of_ranks in runs:
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if case.precision == "bf16-mixed" else {}
        assert_parity(of_ranks[0], single_device(case), **tolerance)


def test_the_ranks_end_with_the_same_bits(runs: Runs) -> None:
    for _, (first, *others) in runs:
        for other in others:
            assert_bitwise_equal(other, first)


def train_on_hosts(hosts: str, **arguments: Any) -> list[Run]:
    """Train where each rank pretends to be on the host of its letter."""
    own = hosts[rank_and_world_size()[0]]
    with patch.object(shm_backend, "own_host", lambda: own):
        return train_cases(**arguments)


@pytest.mark.parametrize(
    ("hosts", "strategies"),
    [
        ("AABB", ["zero2"]),
        pytest.param("AABB", STRATEGIES, marks=SLOW),
        pytest.param("ABAB", STRATEGIES, marks=SLOW),
        pytest.param("AAB", STRATEGIES, marks=SLOW),
    ],
)
def test_ranks_of_several_hosts_train_as_a_single_device(hosts: str, strategies: list[str]) -> None:
    cases = [Case(model="gpt", strategy=one, num_ranks=len(hosts)) for one in strategies]
    of_ranks = run_processes(train_on_hosts, len(hosts), hosts=hosts, cases=cases, backend="shm")
    for case, runs in zip(cases, zip(*of_ranks, strict=True), strict=True):
        assert_parity(runs[0], single_device(case))
        for other in runs[1:]:
            assert_bitwise_equal(other, runs[0])


def train_in_turn(backends: list[str]) -> list[Run]:
    return [train_cases(QUICK, one)[0] for one in backends]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("backends", [["gloo", "shm", "gloo"], ["shm", "gloo"]], ids=str)
def test_a_script_goes_on_over_another_backend(backends: list[str]) -> None:
    """A run over `shm` after one over Gloo ended with an AttributeError of the group that stood."""
    [case] = QUICK
    for run in run_processes(train_in_turn, 2, backends=backends)[0]:
        assert_parity(run, single_device(case))


def gather_over(backends: list[str]) -> list[float]:
    """Gather in a run over the first backend what a group of the second one has."""
    warnings.simplefilter("ignore")
    usual, own = backends
    found = []

    class Gathers(pl.LightningModule):
        def validation_step(self, _: Any) -> None:
            group = dist.new_group(backend=own)
            found.extend(self.all_gather(torch.tensor(float(self.global_rank)), group).tolist())

    strategy = ZeRO2Strategy(backend=usual, announce=False)
    options = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", **options)
    trainer.validate(Gathers(), DataLoader(torch.zeros(2, 1)))
    return found


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("backends", [["shm", "gloo"], ["gloo", "shm"]], ids=str)
def test_a_group_of_ones_own_may_have_another_backend(backends: list[str]) -> None:
    """`all_gather` over a Gloo group failed under shared memory, whose algorithms it was given."""
    assert run_processes(gather_over, 2, backends=backends) == [[0.0, 1.0]] * 2


def check_in_turn() -> list[str]:
    """Return which backend each of several runs talks over, of which some compare their calls."""
    warnings.simplefilter("ignore")
    found = []
    for debug in (False, True, False):
        strategy = ZeRO2Strategy(backend="gloo", debug=debug, announce=False)
        options = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
        trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", **options)
        trainer.validate(BoringModel(), verbose=False)
        found.append(dist.get_backend(strategy.collectives.group))
    return found


def test_a_run_compares_its_calls_after_one_that_did_not() -> None:
    """`debug=True` did nothing where an earlier run had made the default group without it."""
    assert run_processes(check_in_turn, 2) == [["gloo", "checked_gloo", "gloo"]] * 2
