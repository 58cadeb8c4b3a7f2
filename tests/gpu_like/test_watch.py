"""The device without elements finds each wait, mixture of devices and race, and nothing else."""

import json
from typing import Any

import pytest

from tests.gpu_like.planted import IN_ENGINE, MIXED, NO_WAITS, WAITS
from tests.gpu_like.planted_races import RACES
from tests.gpu_like.reasons import unexplained
from tests.processes import run_alone

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
    run = run_alone("-m", "tests.gpu_like.planted", timeout_seconds=120)
    assert run.returncode == 0, run.output
    return dict(json.loads(run.output.splitlines()[-1]))


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


# Parts of what is found: who does what first, and then, of at least one of the races of a fit.
FOUND = {
    "gathered parameters are used at once": ("_allgather_base_", "stream reads"),
    "published parameters are used at once": ("_allgather_base_", "stream reads"),
    "reduced shards are used at once": ("_reduce_scatter_base_", "stream"),
    "averages are used at once": ("allreduce_", "stream"),
    "received activations are used at once": ("recv_", "stream reads"),
    "sums of layers are used at once": ("allreduce_", "stream"),
    "other ranks' heads are used at once": ("alltoall_base_", "stream reads"),
    "shards of all dimensions are used at once": ("_reduce_scatter_base_", "stream"),
    "averaged parameters are used at once": ("allreduce_", "stream"),
    "chosen elements are used at once": ("alltoall_base_", "stream reads"),
    "matrices of low rank are used at once": ("allreduce_", "stream"),
    "signs are used at once": ("_allgather_base_", "stream reads"),
    "bytes are used at once": ("alltoall_base_", "stream reads"),
    "a sum is divided before it has come": ("_reduce_scatter_base_", "div_"),
    "memory that is gathered into is freed": ("_allgather_base_", "reuse, freed by resize_(0)"),
    "gradients on their way are freed": ("_reduce_scatter_base_", "reuse, freed by resize_(0)"),
    "gradients on their way are changed": ("_reduce_scatter_base_", "zero_"),
    "a shard that is gathered is changed": ("_allgather_base_", "mul_"),
    "flags on their way are changed": ("allreduce_", "zero_"),
    "a message is changed before it is sent up": ("stream reads: _to_copy", "host writes: zero_"),
    "copies follow nothing": ("stream", "side stream"),
    "what is copied down is not kept": ("side stream", "reuse"),
    "what is copied up is used at once": ("side stream", "stream reads"),
    "the host reads what is still copied down": ("side stream 1 writes: copy_", "host reads"),
    "the host changes what is copied up": ("side stream", "host writes"),
    "another stream reads at once": ("_allgather_base_", "side stream"),
    "another stream is read from at once": ("side stream", "stream reads: sum"),
    "memory that another stream reads is dropped": ("side stream", "stream writes: reuse"),
}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Run all fits in a process of its own, which torch tells of the device for good."""
    run = run_alone("-m", "tests.gpu_like.planted_races", timeout_seconds=900)
    assert run.returncode == 0, run.output
    return dict(json.loads(line) for line in run.output.splitlines() if line.startswith('["'))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", RACES)
def test_a_planted_race_is_found(seen: dict[str, Any], name: str) -> None:
    first, second = FOUND[name]
    assert not seen[name]["error"]  # else nothing was looked at
    races = seen[name]["races"]
    assert any(first in one and second in other for one, other, _ in races), races
