"""Objects as bytes: what is JSON, what is a pickle, and what is not read at all."""

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.backends.authentication.token import remember, remembered
from lightning_shard.backends.liveness.server import LivenessVerdict
from lightning_shard.backends.objects import CODE_BYTES, pack, unpack
from lightning_shard.core.layout import FlatLayout
from lightning_shard.errors import RankFailedError
from tests.security.attacks import Mark


@pytest.fixture
def token() -> Iterator[None]:
    before = remembered()
    remember("token of the tests")
    yield
    remember(before)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        [1, -2.5, float("inf"), True, "é\ud800"],
        {"a": (1, [2, {3: {4, 5}}]), (6, 7): frozenset({b"\xff"})},
        (torch.bfloat16, torch.Size([2, 3]), torch.device("cuda:1")),
        LivenessVerdict(rank=1, event="died", doing="it was in all_reduce"),
    ],
)
def test_plain_objects_and_our_records_are_no_pickles(obj: Any, token: None) -> None:
    data = pack(obj)
    assert data[CODE_BYTES:][:1] == b"j"
    made = unpack(data, "test")
    assert made == obj
    assert type(made) is type(obj)


@pytest.mark.parametrize("obj", [timedelta(seconds=1), {"path": Path("a")}, [[]] * 2])
def test_any_object_of_a_user_comes_back(obj: Any, token: None) -> None:
    assert unpack(pack(obj), "test") == obj


@pytest.mark.parametrize("code", [bytes(CODE_BYTES), b"", b"x" * CODE_BYTES])
def test_a_stranger_in_a_group_has_no_pickle_run(code: bytes, token: None, tmp_path: Path) -> None:
    """A stranger in a group had its pickles run."""
    mark = tmp_path / "mark"
    with pytest.raises(RankFailedError, match=r"test: got .* bytes that do not bear this job's"):
        unpack(code + b"p" + pickle.dumps(Mark(mark)), "test")
    with pytest.raises(RankFailedError):
        unpack(code + pickle.dumps(Mark(mark)), "test")
    assert not mark.exists()


def test_another_jobs_objects_are_refused(token: None) -> None:
    data = pack({"a": 1})
    remember("token of another job")
    with pytest.raises(RankFailedError, match="LIGHTNING_SHARD_JOB_TOKEN"):
        unpack(data, "test")


def test_a_class_of_ours_that_is_no_record_is_a_pickle(token: None) -> None:
    assert issubclass(FlatLayout, object)
    assert pack(FlatLayout)[CODE_BYTES:][:1] == b"p"
