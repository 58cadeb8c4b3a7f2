"""Tensors that arrive from ranks with slices are those that were cut, in a few messages' memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint import arriving as module
from lightning_shard.checkpoint.arriving import ArrivingTensor, SlicedTensor, arriving
from lightning_shard.errors import RankFailedError
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import world

CPU = torch.device("cpu")
NUM_RANKS = 3
MESSAGE_BYTES = 64
WHOLE: dict[str, tuple[Tensor, Sequence[int]]] = {  # with the elements of each rank
    "many": (torch.arange(300.0).view(30, 10), (100, 70, 130)),
    "none": (torch.empty(0, 4), (0, 0, 0)),
    "of one": (torch.tensor([True, False, True]), (0, 3, 0)),
    "here": (torch.arange(40, dtype=torch.int16), (40, 0, 0)),
    "number": (torch.tensor(1.5, dtype=torch.float64), (0, 0, 1)),
    "waves": (torch.full((5, 3), complex(1.0, -2.0)), (1, 7, 7)),
    "half": (torch.randn(33, dtype=torch.bfloat16), (11, 11, 11)),
}


@pytest.fixture(autouse=True)
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut what is sent in messages of a few numbers."""
    monkeypatch.setattr(module, "_FEWEST_BYTES", MESSAGE_BYTES)
    monkeypatch.setattr(module, "ARRIVING_BYTES", MESSAGE_BYTES)
    monkeypatch.setattr(module, "PART_BYTES", 48)


def sliced(rank: int, *, lacking: int | None = None) -> list[SlicedTensor]:
    found = []
    for whole, numels in WHOLE.values():
        own = whole.view(-1).split(list(numels))[rank]
        own_or_none = None if rank == lacking or not own.numel() else own
        found.append(SlicedTensor(whole.shape, whole.dtype, numels, own_or_none))
    return found


def brought(rank: int, *, looks: Sequence[str], lacking: int | None = None) -> list[Tensor]:
    ranks: Collectives = world("in_process")
    coming = arriving(sliced(rank, lacking=lacking), ranks, CPU)
    found = [
        one.tensor() if name in looks else torch.empty(0)
        for name, one in zip(WHOLE, coming, strict=True)
    ]
    return found if rank == 0 else []


@pytest.mark.parametrize("looks", [list(WHOLE), ["of one", "waves"], []])
def test_what_arrives_is_what_was_cut_also_where_some_of_it_is_passed_over(looks: Any) -> None:
    found = run_ranks(partial(brought, looks=looks), NUM_RANKS)[0]
    for (name, (whole, _)), tensor in zip(WHOLE.items(), found, strict=True):
        if name in looks:
            torch.testing.assert_close(tensor, whole, rtol=0, atol=0)


@pytest.mark.parametrize("lacking", [0, 2])
def test_a_rank_without_a_slice_that_it_should_have_has_zeros(lacking: int) -> None:
    found = run_ranks(partial(brought, looks=list(WHOLE), lacking=lacking), NUM_RANKS)[0]
    whole, numels = WHOLE["many"]
    expected = list(whole.view(-1).split(list(numels)))
    expected[lacking] = torch.zeros_like(expected[lacking])
    assert torch.equal(found[0].view(-1), torch.cat(expected))


def test_rank_0_holds_a_few_messages_of_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    held, inboxes, real = [], set[Any](), module._Inbox._post

    def post(self: Any, buffer: Tensor) -> None:
        real(self, buffer)
        inboxes.add(self)
        held.append(sum(data.numel() for one in inboxes for _, data in one._coming))

    monkeypatch.setattr(module._Inbox, "_post", post)
    run_ranks(partial(brought, looks=list(WHOLE)), NUM_RANKS)
    assert MESSAGE_BYTES < max(held) <= (NUM_RANKS - 1) * 3 * MESSAGE_BYTES


class Lost(Collectives):
    """A group of two whose other rank is lost after its first messages."""

    def __init__(self) -> None:
        self.rank, self.size, self.asked = 0, 2, 0

    def recv(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        self.asked += 1
        return _Coming(is_lost=self.asked > 3)


class _Coming(NamedTuple):
    is_lost: bool

    def wait(self) -> None:
        if self.is_lost:
            raise RankFailedError("rank 1 is lost")


def test_a_lost_peer_is_told_again_to_who_waits_for_the_rest() -> None:
    whole = torch.zeros(150, dtype=torch.uint8)
    one = SlicedTensor(whole.shape, whole.dtype, (0, 150), None)
    coming = arriving([one, one], Lost(), CPU)
    assert next(coming).tensor().numel() == 150
    second = next(coming)
    with pytest.raises(RankFailedError):
        second.tensor()
    with pytest.raises(RankFailedError):  # the writer has given up, and what is left is run through
        next(coming)


def test_a_tensor_that_is_here_has_its_elements_in_order() -> None:
    turned = torch.arange(12.0).view(3, 4).t().requires_grad_()
    assert torch.equal(ArrivingTensor.here(turned).tensor(), turned.detach())
    assert ArrivingTensor.here(turned).num_bytes == 48
