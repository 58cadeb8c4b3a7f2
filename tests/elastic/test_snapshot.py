"""What one rank needs to remember, in one buffer."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.rank_snapshot import PARAMETERS, Snapshot, TensorKey, take
from lightning_shard.errors import CheckpointError
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, attach, start


def alone(fn: Any) -> Any:
    return run_ranks(fn, 1)[0]


def values(snapshot: Snapshot, flat: int, name: str, optimizer: int = 0) -> Tensor:
    place = optimizer if name else PARAMETERS
    key = TensorKey(flat=flat, optimizer=place, name=name, dtype=torch.float32)
    return snapshot.elements(key, 0, snapshot.metadata.tensor_entries[key].numel).view(
        torch.float32
    )


@pytest.mark.parametrize("stage", range(4))
def test_says_what_it_is(stage: int) -> None:
    def fn(rank: int) -> Snapshot:
        return start(Setting(stage=stage)).snapshot(
            7, extra=b"loops", generation=3, owner=f"member {rank}"
        )

    for rank, snapshot in enumerate(run_ranks(fn, 3)):
        assert snapshot is not None
        metadata = Snapshot.read(snapshot.data.clone()).metadata
        assert (metadata.generation, metadata.step, metadata.owner) == (3, 7, f"member {rank}")
        assert (metadata.shard, metadata.num_shards) == ((rank, 3) if stage else (0, 1))
        assert metadata.extra == b"loops"


@pytest.mark.parametrize("stage", range(4))
def test_holds_the_shards_and_the_state_in_shards(stage: int) -> None:
    def fn(_: int) -> None:
        rank = start(Setting(stage=stage))
        rank.train(0, 2)
        snapshot = rank.snapshot(2)
        for number, flat in enumerate(rank.engine.flats):
            assert torch.equal(values(snapshot, number, ""), flat.shard)
            for index, param in enumerate(flat.params):
                shard = rank.optimizer.state.get(param, {}).get("exp_avg")
                if shard is not None and shard.numel():
                    views = flat.shard_views(values(snapshot, number, "exp_avg"))
                    assert torch.equal(views[index], shard)

    run_ranks(fn, 3)


def test_what_happens_afterwards_does_not_change_it() -> None:
    def fn(_: int) -> None:
        rank = start(Setting(stage=2))
        rank.train(0, 1)
        snapshot = rank.snapshot(1)
        before = snapshot.data.clone(), pickle.dumps(snapshot.metadata)
        rank.train(1, 3)
        assert torch.equal(snapshot.data, before[0])
        assert pickle.dumps(snapshot.metadata) == before[1]

    run_ranks(fn, 2)


def test_learning_rates_that_are_tensors_are_copied() -> None:
    def fn(_: int) -> None:
        rank = start(Setting(stage=1))
        rate = torch.tensor(0.5)
        rank.optimizer.param_groups[0]["lr"] = rate
        snapshot = rank.snapshot(0)
        rate.fill_(0.25)
        assert snapshot.metadata.groups[0][0]["lr"] == 0.5

    alone(fn)


@pytest.mark.parametrize("stage", range(4))
def test_what_user_code_changes_between_the_steps_is_in_it(stage: int) -> None:
    def fn(_: int) -> None:
        rank = start(Setting(stage=stage, compute=torch.bfloat16))
        rank.train(0, 1)
        with torch.no_grad():
            for param in rank.model.parameters():
                param.fill_(0.5)
        snapshot = rank.snapshot(1)
        for number, flat in enumerate(rank.engine.flats):
            for view in flat.shard_views(values(snapshot, number, "")):
                assert torch.equal(view, torch.full_like(view, 0.5))

    run_ranks(fn, 2)


def test_equal_entries_are_stored_once() -> None:
    def size(num_layers: int) -> int:
        def fn(_: int) -> int:
            model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(num_layers)))
            optimizer = optim.AdamW(model.parameters())
            engine = attach(Setting(stage=0), model, optimizer).engine
            model(torch.ones(1)).backward()
            optimizer.step()
            metadata = take(engine, [optimizer], step=1).metadata
            return len(pickle.dumps(metadata.states))

        return int(alone(fn))

    assert size(80) - size(40) < 40 * 2 * 8


def test_buffers_are_used_again() -> None:
    def fn(_: int) -> None:
        rank = start(Setting(stage=1))
        buffers = HostBuffers()
        first = rank.snapshot(0, buffers=buffers)
        rank.train(0, 1)  # there is state now: far larger
        second = rank.snapshot(1, buffers=buffers, extra=b"1")
        buffers.give_back(second.data)
        third = rank.snapshot(2, buffers=buffers, extra=b"more than before")
        assert third.data.data_ptr() == second.data.data_ptr()
        fourth = rank.snapshot(3, buffers=buffers)
        assert fourth.data.data_ptr() not in (first.data.data_ptr(), third.data.data_ptr())
        assert third.metadata.step == 2

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    "data",
    [b"", b"LSsnap01", b"LSsnap00" + bytes(100), b"LSsnap01" + b"\xff" * 56],
    ids=["empty", "prefix only", "other version", "too short"],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    with pytest.raises(CheckpointError, match="is no whole snapshot"):
        Snapshot.read(buffer.to(torch.uint8))
