"""Messages between two ranks of different hosts, over Gloo."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from lightning_shard.backends.calls import Call
from lightning_shard.backends.group_handle import CallWork
from lightning_shard.backends.packing import pack, room_for, unpack
from lightning_shard.backends.python_group import ANY_SOURCE
from lightning_shard.backends.shm.exchange import GlooRanks, bytes_of


class MessageWork(CallWork):
    """The handle of one message.

    Args:
        call: What this rank has called.
        works: Gloo's handle of each tensor's message.
        kept: What Gloo moves until then.
        finish: Called once, when the message has come.
    """

    def __init__(
        self,
        call: Call,
        works: Sequence[dist.Work],
        kept: Sequence[object],
        finish: Callable[[], None],
    ) -> None:
        super().__init__(call)
        self._works, self._kept, self._finish = works, kept, finish
        self._has_ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has left, or has come.

        Args:
            timeout: A time-out shorter than the group's; None, or c10d's zero, for the group's.
        """
        if self._has_ended:
            return True
        for work in self._works:
            work.wait(*((timeout,) if timeout else ()))
        self._has_ended = True
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the message has left, or is known to have come; a wait knows it."""
        return self._has_ended or all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether the message has left, or has come."""
        return self.is_completed()

    def _source(self) -> int:
        return int(self._works[-1]._source_rank()) if self._call.root < 0 else self._call.root

    def get_future(self) -> Future[Any]:
        """Wait, and return a future that is done."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(list(self._call.results))
        return future


def send(ranks: GlooRanks, call: Call) -> MessageWork:
    """Start to send a call's tensors to its root."""
    kept = [pack([tensor]) for tensor in call.inputs]
    works = [ranks.group.send([bytes_of(one)], call.root, call.tag or 0) for one in kept]
    return MessageWork(call, works, kept, lambda: None)


def receive(ranks: GlooRanks, call: Call) -> MessageWork:
    """Start to receive a call's tensors from its root, or from whichever rank sends first."""
    rooms, tag = [room_for([tensor]) for tensor in call.outputs], call.tag or 0
    works = [
        ranks.group.recv_anysource([bytes_of(one)], tag)
        if call.root == ANY_SOURCE
        else ranks.group.recv([bytes_of(one)], call.root, tag)
        for one in rooms
    ]

    def finish() -> None:
        for room, tensor in zip(rooms, call.outputs, strict=True):
            unpack(room, [tensor])

    return MessageWork(call, works, rooms, finish)
