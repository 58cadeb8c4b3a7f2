"""Steps of four processes over Gloo are taken again in one process, bit for bit, or one rank."""

import shutil
from pathlib import Path

import pytest

from lightning_shard.replay.rank_record import path_of
from tests.processes import run_processes
from tests.replay.recorded import Dropping, Failing, fit_in_processes, replayed
from tests.strategies.parity import ignoring

pytestmark = ignoring()
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
