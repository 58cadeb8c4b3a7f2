"""Steps of four processes over Gloo are taken again in one process, bit for bit."""

from pathlib import Path

import pytest

from tests.processes import run_processes
from tests.replay.recorded import Failing, fit_in_processes, replayed
from tests.strategies.parity import UPSTREAM_WARNINGS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]
_SLOW = pytest.mark.slow


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
    raised = run_processes(fit_in_processes, 4, folder=tmp_path, strategy=strategy)
    assert raised[2].startswith("ValueError: the norm is 0x")
    found = replayed(tmp_path, 3, strategy, callbacks=[Failing()])
    assert found.outcome == "reproduced"
    assert found.is_bitwise
    assert found.recorded == f"rank 2: {raised[2]}"
    assert str(found.error) == raised[2].removeprefix("ValueError: ")
    asked = replayed(tmp_path, 1, strategy)
    assert (asked.outcome, asked.is_bitwise, asked.error) == ("reproduced", True, None)
