"""The device without elements finds each wait and each mixture of devices, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_like.planted import IN_ENGINE, MIXED, NO_WAITS, WAITS
from tests.gpu_like.reasons import unexplained

pytestmark = pytest.mark.slow  # half a minute to build what torch is told of

WAITS_FOR = {
    "item": "item",
    "float": "item",
    "if": "item",
    "in a hook of backward": "item",
    "cpu": "copy to the host",
    "copy down": "copy to the host",
    "copy down, not to pinned memory": "copy to the host",
    "tensor of Python's": "copy from the host (pageable)",
    "pageable copy": "copy from the host (pageable)",
    "blocking copy": "copy from the host (pinned, but blocking)",
    "copy into": "copy from the host (pageable)",
    "a number at one element": "copy from the host (pageable)",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Run what is planted in a process of its own, which torch tells of the device for good."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu_like.planted"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_found(found: dict[str, Any], name: str) -> None:
    assert found[f"waits: {name}"] == [WAITS_FOR.get(name, name)]


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_a_gpu_does_beside_the_host_is_no_wait(found: dict[str, Any], name: str) -> None:
    assert found[f"none: {name}"] == []


@pytest.mark.parametrize("name", MIXED)
def test_a_mixture_of_devices_fails(found: dict[str, Any], name: str) -> None:
    assert "expected all of them on the device" in found[f"mixed: {name}"]


@pytest.mark.parametrize("name", IN_ENGINE)
def test_what_is_put_into_the_engine_is_found_in_a_fit(found: dict[str, Any], name: str) -> None:
    seen = found[f"engine: {name}"]
    if "mixture" in name:
        assert "expected all of them on the device" in seen["error"]
        return
    assert seen["error"] == ""
    waits = unexplained(map(tuple, seen["waits"]), seen["num_steps"])
    what = "copy from the host (pageable)" if "copy" in name else "item"
    assert {wait[0] for wait in waits} == {what}
    assert sum(wait[-1] for wait in waits) >= seen["num_steps"]


def test_a_message_is_read_as_it_was_sent_until_it_is_written(found: dict[str, Any]) -> None:
    assert found["read back"] == [[2.0, 3.0], [0.0, 0.0, 0.0]]
