"""What a replay refuses, and what it notices; ranks of this process and of four others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_shard
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.replay import RecordSteps, rank_record, replay
from lightning_shard.replay.rank_record import RankRecord, path_of
from tests.processes import run_processes
from tests.replay.recorded import Dropping, Failing, fit, fit_in_processes, replayed
from tests.strategies.parity import SMALL_BUCKET_MB, ignoring

pytestmark = ignoring()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two ranks step 3, which fails on rank 1, and step 1, which was asked for."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(ValueError, match="the norm"):
        fit(folder, "zero2", ranks=2, callbacks=[Failing(1)], recording={"steps": [1]})
    return folder


def test_a_mended_step_is_not_reproduced(runs: Path) -> None:
    found = replayed(runs, 3, "zero2")
    assert (found.outcome, found.exit_status, found.error) == ("not reproduced", 1, None)
    assert found.replayed == "no error"
    told = json.loads(found.as_json())
    assert told["recorded"].startswith("rank 1: ValueError: the norm is 0x")


def test_other_values_are_noticed(runs: Path) -> None:
    class Scaled(Dropping):
        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return super().loss(batch) * 1.25

    strategy = lightning_shard.ZeRO2Strategy(bucket_mb=SMALL_BUCKET_MB)
    found = replay(runs / "step-00000001", Scaled(), strategy=strategy)
    assert (found.outcome, found.is_bitwise) == ("not reproduced", False)
    assert "rank 0, backward pass 0: got" in found.losses
    assert found.losses.endswith("relative deviation 2.5e-01")
    assert "other bits" in found.state


def test_a_replay_leaves_the_callers_random_streams_and_threads(runs: Path) -> None:
    torch.manual_seed(99)  # as `replayed` does, before it makes the module
    Dropping()
    expected = torch.get_rng_state(), torch.get_num_threads()
    replayed(runs, 1, "zero2")
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert torch.get_num_threads() == expected[1]


def test_another_strategy_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="got the strategy 'zero3', expected 'zero2'"):
        replayed(runs, 1, "zero3")
    with pytest.raises(ConfigError, match="replay got the strategy 'ddp'"):
        replay(runs / "step-00000001", Dropping(), strategy="ddp")


def test_other_units_and_another_model_are_refused(runs: Path) -> None:
    with pytest.raises(CheckpointError, match="All ranks need the same model, units, bucket_mb"):
        replay(runs / "step-00000001", Dropping())
    other = Dropping()
    other.head = nn.Linear(24, 3)
    strategy = lightning_shard.ZeRO2Strategy(bucket_mb=SMALL_BUCKET_MB)
    with pytest.raises(CheckpointError, match="All ranks need the same model, units, bucket_mb"):
        replay(runs / "step-00000001", other, strategy=strategy)


def _without_rank_1(folder: Path) -> None:
    path_of(folder, 1).unlink()


def _cut_off(folder: Path) -> None:
    path = path_of(folder, 1)
    path.write_bytes(path.read_bytes()[:1000])


def _of_another_step(folder: Path) -> None:
    shutil.copy(path_of(folder.parent / "other", 1), path_of(folder, 1))


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_rank_1, "has no file of rank 1 of 2"),
        (_cut_off, "rank-00001.pt cannot be read"),
        (_of_another_step, r"begin at different steps, \[3, 1\]"),
        (_emptied, "holds no recorded step, expected files such as rank-00000.pt"),
    ],
)
def test_files_that_are_not_whole_are_refused(
    spoil: Callable[[Path], None], message: str, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "step-00000003", tmp_path / "step-00000003")
    shutil.copytree(runs / "step-00000001", tmp_path / "other")
    spoil(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match=message):
        replayed(tmp_path, 3, "zero2")


class Notes:
    """A class of user code."""

    def __init__(self) -> None:
        self.text = "mine"


def test_classes_of_user_code_take_trust(runs: Path, tmp_path: Path) -> None:
    record = RankRecord.load(path_of(runs / "step-00000001", 0))
    record.given[0].batch.append(Notes())
    path = record.save(tmp_path)
    with pytest.raises(CheckpointError, match=f"it holds {__name__}.Notes.*--trust"):
        RankRecord.load(path)
    assert RankRecord.load(path, trust=True).given[0].batch[-1].text == "mine"


def test_a_file_of_another_version_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_record, "_FORMAT", 3)
    with pytest.raises(CheckpointError, match="no record of a rank in the format 3"):
        replayed(runs, 1, "zero2")


def test_the_names_are_there() -> None:
    assert lightning_shard.replay.RecordSteps is RecordSteps


_SLOW = pytest.mark.slow
_RANKS = 4


@pytest.mark.parametrize(
    "strategy",
    [
        "zero3",
        pytest.param("zero2", marks=_SLOW),
        pytest.param("zero1", marks=_SLOW),
        pytest.param("shard_ddp", marks=_SLOW),
    ],
)
def test_a_failing_step_of_four_processes_has_the_same_bits_in_one(
    strategy: str, tmp_path: Path
) -> None:
    raised = run_processes(fit_in_processes, _RANKS, folder=tmp_path, strategy=strategy)
    assert raised[2].startswith("ValueError: the norm is 0x")
    found = replayed(tmp_path, 3, strategy, callbacks=[Failing()])
    assert found.outcome == "reproduced"
    assert found.is_bitwise
    assert found.recorded == f"rank 2: {raised[2]}"
    assert str(found.error) == raised[2].removeprefix("ValueError: ")
    asked = replayed(tmp_path, 1, strategy)
    assert (asked.outcome, asked.is_bitwise, asked.error) == ("reproduced", True, None)
    _check_each_alone(tmp_path, strategy, raised[2])


def _check_each_alone(folder: Path, strategy: str, raised: str) -> None:
    """Replay each rank by its own file."""
    for rank in range(_RANKS):
        apart = folder / f"of rank {rank}"
        for step in (1, 3):
            own = path_of(folder / f"step-{step:08d}", rank)
            (apart / own.parent.name).mkdir(parents=True)
            shutil.copy(own, apart / own.parent.name)
        found = replayed(apart, 3, strategy, callbacks=[Failing()], rank=rank)
        assert (found.outcome, found.is_bitwise, found.rank) == ("reproduced", True, rank)
        if rank == 2:
            assert found.replayed == f"rank 2: {raised}"
        asked = replayed(apart, 1, strategy, callbacks=[Failing()], rank=rank)
        assert (asked.outcome, asked.is_bitwise, asked.error) == ("reproduced", True, None)


class Wide(Dropping):
    """Some millions of parameters, more than Gloo's ring sends at once."""

    def __init__(self) -> None:
        super().__init__(width=480)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2"])
def test_millions_of_parameters_have_the_same_bits(strategy: str, tmp_path: Path) -> None:
    recording = {"steps": [1], "results": False}
    options = {"module": Wide(), "recording": recording, "folder": tmp_path}
    run_processes(fit_in_processes, _RANKS, strategy=strategy, **options)
    for step, callbacks in ((1, []), (3, [Failing()])):
        found = replayed(tmp_path, step, strategy, callbacks=callbacks, module=Wide())
        assert (found.outcome, found.is_bitwise) == ("reproduced", True)
