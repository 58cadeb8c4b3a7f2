"""Whether ranks have failed at the same place."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_shard.backends import liveness
from lightning_shard.backends.collectives import Collectives
from lightning_shard.environments.launchers.failures import all_raise


def calls_told_of(monkeypatch: pytest.MonkeyPatch, **calls: int) -> int:
    told: list[int] = []

    def fail(error: BaseException, number: int) -> bool:
        told.append(number)
        return True

    lifeline: Any = SimpleNamespace(fail=fail)
    traffic = {name: SimpleNamespace(calls=number) for name, number in calls.items()}
    monkeypatch.setattr(liveness, "current", lambda: lifeline)
    monkeypatch.setattr(Collectives, "traffic_by_group", lambda: [SimpleNamespace(traffic=traffic)])
    all_raise(ValueError("mine"))
    return told[0]


def test_neighbours_in_a_pipeline_never_seemed_to_be_at_the_same_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = calls_told_of(monkeypatch, all_reduce=3, send=8, recv=4)
    last = calls_told_of(monkeypatch, all_reduce=3, send=4, recv=8, barrier=0)
    assert first == last == 3
