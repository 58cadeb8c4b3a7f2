"""A signal ends a fit: it is saved once, and goes on at the next sample."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    PipelineParallelStrategy,
    ZeRO3Strategy,
)
from tests.checkpoint.interrupted import IGNORED, RANKS, SCHEMES, deviation, fit
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.preempted import (
    Seeing,
    Sends,
    Validating,
    go_on,
    preempted,
    resumed,
    seen,
    steps_saved,
    train_until,
)

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_sigterm_saves_what_was_trained_since_the_last_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """SIGTERM lost what was trained since the last checkpoint."""
    whole = fit(SCHEMES[name](), 9)
    first = preempted(SCHEMES[name](), tmp_path, Sends("on_train_batch_start", 5))
    assert steps_saved(tmp_path) == {"epoch=0-step=4.ckpt": 4, "last-sigterm.ckpt": 6}
    second = resumed(SCHEMES[name](), tmp_path)
    assert seen(first, second) == seen(whole)
    assert deviation(second, whole) == 0.0


SAMPLES: dict[str, Callable[[], Any]] = {
    "async_sgd": lambda: AsyncSGDStrategy(**RANKS),
    "elastic": lambda: ElasticStrategy(**RANKS, snapshot_every=1),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_preempted_fit_goes_on_at_the_next_samples(name: str, tmp_path: Path) -> None:
    """The samples of a fit were not those that followed."""
    whole = Seeing.fitted(SAMPLES[name](), tmp_path / "whole")
    options: dict[str, Any] = {"make_module": Seeing, "default_root_dir": tmp_path}
    sends = Sends("on_train_batch_start", 4)
    first = preempted(SAMPLES[name](), tmp_path / "own", sends, **options)
    at = len(first.samples)
    names = {"last-sigterm.ckpt", f"last-elastic-step={at}.ckpt"}
    assert len(steps_saved(tmp_path / "own").keys() & names) == 1
    second = resumed(SAMPLES[name](), tmp_path / "own", **options)
    assert 4 < at < 9
    assert first.samples + second.samples == whole.samples


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("make", [DDPStrategy, PipelineParallelStrategy])
@pytest.mark.parametrize(
    ("hook", "step", "at"),
    [
        ("on_validation_batch_end", 6, 6),  # in the middle of a validation
        ("on_validation_end", 4, 4),  # before the first batch of the next epoch
        ("on_train_epoch_end", 4, 4),
        ("on_train_batch_start", 8, 9),  # in the last step
    ],
)
def test_a_validation_goes_on_with_its_batches_and_an_epoch_in_its_order(
    make: Any, hook: str, step: int, at: int, tmp_path: Path
) -> None:
    """A validation went on with other batches and an epoch in another order."""
    options: dict[str, Any] = {"make_module": Validating, "val_check_interval": 2}
    whole = fit(make(**RANKS), 9, num_sanity_val_steps=0, **options)
    first = preempted(make(**RANKS), tmp_path, Sends(hook, step), **options)
    assert steps_saved(tmp_path)["last-sigterm.ckpt"] in {at, at + 1}
    second = resumed(make(**RANKS), tmp_path, **options)
    assert seen(first, second) == seen(whole)
    assert deviation(second, whole) == 0.0


def test_each_callback_that_saves_has_its_file_and_there_is_no_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callbacks = [
        ModelCheckpoint(tmp_path, filename="own", save_on_exception=True),
        OnExceptionCheckpoint(tmp_path),
        Sends("on_train_batch_start", 2),
    ]
    with pytest.raises(SIGTERMException):
        fit(ZeRO3Strategy(**RANKS), 9, callbacks, enable_checkpointing=True)
    assert steps_saved(tmp_path) == {"own.ckpt": 3, "on_exception.ckpt": 3}


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_saved_that_was_not_asked_for(asked: bool, tmp_path: Path) -> None:
    strategy = DDPStrategy(**RANKS, save_on_sigterm=asked)
    saves = ModelCheckpoint(tmp_path, save_top_k=0) if asked else ModelCheckpoint(tmp_path)
    callbacks: list[L.Callback] = [saves, Sends("on_train_batch_start", 2)]
    with pytest.raises(SIGTERMException):
        fit(strategy, 9, callbacks, enable_checkpointing=True)
    assert steps_saved(tmp_path) == {}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that SLURM runs this process; return the file where `scontrol` notes its calls."""
    calls, program = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    for name, value in {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return calls


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_slurms_signal_saves_one_checkpoint_of_all_ranks(
    signum: int, scontrol: Path, tmp_path: Path
) -> None:
    """SLURM's signal saved where each rank was."""
    environment = SLURMEnvironment(requeue_signal=signal.Signals(signum))
    options: dict[str, Any] = {"default_root_dir": tmp_path, "plugins": [environment]}
    whole = fit(ZeRO3Strategy(**RANKS), 9, default_root_dir=tmp_path / "whole")
    before = signal.getsignal(signum)
    sends = Sends("on_train_batch_start", 5, signum)
    first = preempted(ZeRO3Strategy(**RANKS), tmp_path / "own", sends, **options)
    assert signal.getsignal(signum) is before
    assert scontrol.read_text() == "requeue 77\n"
    assert steps_saved(tmp_path) == {"hpc_ckpt_1.ckpt": 6}
    assert "last-sigterm.ckpt" not in steps_saved(tmp_path / "own")
    second = resumed(ZeRO3Strategy(**RANKS), tmp_path / "new", resume=None, **options)
    assert seen(first, second) == seen(whole)
    assert deviation(second, whole) == 0.0


def test_a_job_is_requeued_before_its_first_step_and_saves_nothing(
    scontrol: Path, tmp_path: Path
) -> None:
    class AtOnce(L.Callback):
        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)

    options: dict[str, Any] = {"num_sanity_val_steps": 4, "default_root_dir": tmp_path}
    options["make_module"] = Validating
    preempted(DDPStrategy(**RANKS), tmp_path / "own", AtOnce(), **options)
    assert scontrol.read_text() == "requeue 77\n"
    assert steps_saved(tmp_path) == {}


def test_what_a_killed_save_has_left_is_no_checkpoint_of_slurms(
    scontrol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed save has left was counted as a checkpoint of SLURM's."""
    written: list[str] = []
    save = DDPStrategy.save_checkpoint

    def noting(self: Any, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        written.append(Path(filepath).name)
        save(self, checkpoint, filepath, storage_options)

    monkeypatch.setattr(DDPStrategy, "save_checkpoint", noting)
    sends = Sends("on_train_batch_start", 2, signal.SIGUSR1)
    preempted(DDPStrategy(**RANKS), tmp_path / "own", sends, default_root_dir=tmp_path)
    assert {name for name in written if "hpc_ckpt_" in name} == set()
    assert steps_saved(tmp_path) == {"hpc_ckpt_1.ckpt": 3}


def check_processes(run: Any, folder: Path, backend: str, signum: int) -> None:
    told = {"folder": folder, "backend": backend, "signum": signum, "timeout_seconds": 250}
    ends = run(train_until, 2, **told)
    others = run(go_on, 2, **told)
    requeues = signum != signal.SIGTERM
    expected = ["SIGTERMException" if requeues else "RankFailedError", "SIGTERMException"]
    assert [error for _, _, error in ends] == expected
    for (first, whole, _), second in zip(ends, others, strict=True):
        assert first[0] + second[0] == whole[0]
        assert len(first[0]) in range(6, 9)
    saved = steps_saved(folder)
    assert saved["hpc_ckpt_1.ckpt" if requeues else "last-sigterm.ckpt"] == len(ends[0][0][0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_process_saves_and_all_go_on(
    signum: int, scontrol: Path, tmp_path: Path
) -> None:
    check_processes(run_processes, tmp_path, "gloo", signum)
    assert scontrol.exists() == (signum == signal.SIGUSR1)
    assert not scontrol.exists() or scontrol.read_text() == "requeue 77\n"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_signal_to_one_rank_of_mpi_saves_and_all_go_on(tmp_path: Path) -> None:
    check_processes(run_mpi, tmp_path, "mpi", signal.SIGTERM)
