"""The meeting place of one group's ranks, and the arithmetic of what they call there.

Each rank's k-th collective meets its peers' k-th. The first to call says what is expected; the last
computes with everybody's tensors, in rank order. Sends and receives are matched by peer and
tag, first come first served; a send is over when its receive has come, as with Gloo and NCCL.

Sources that lie in the storage of a target are copied first, so that every way to alias is right.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_shard.backends.calls import Call, Disagreement, describe_tensor, message_key
from lightning_shard.backends.group_handle import describe_group
from lightning_shard.backends.in_process.rank_globals import for_all_ranks
from lightning_shard.backends.packing import pack, raw, unaliased, unpack, write
from lightning_shard.backends.python_group import ANY_SOURCE
from lightning_shard.backends.rank_order import fold_of, reduce_tensors
from lightning_shard.backends.streams import join_streams, mark_streams

_SEGMENT_BYTES = 1 << 20  # the most that Gloo sends at once
_like_gloo: list[bool] = [False]


@contextmanager
def like_gloo() -> Iterator[None]:
    """Let worlds that are made inside add up in Gloo's order."""
    _like_gloo.append(True)
    try:
        yield
    finally:
        _like_gloo.pop()


def is_like_gloo() -> bool:
    """Whether a world that is made now adds up in Gloo's order."""
    return _like_gloo[-1]


def all_reduce_in_ring(calls: Sequence[Call]) -> None:
    """Reduce the tensors of all ranks' calls in place, in the order of Gloo's ring, to its bits.

    A tensor is cut into as many parts as there are ranks, whose sums begin at the rank before their
    own and grow as they travel downwards. Halves are added up in their own format.

    Source: `ring` in gloo/allreduce.cc; checked with torch 2.13,
    `tests/backends/in_process/test_channel.py` fails when it changes.
    """
    parts = [pack(call.inputs).clone() for call in calls]
    total = reduce_in_ring(parts, calls[0].reduce_op)
    for call in calls:
        unpack(total, call.inputs)


def reduce_in_ring(tensors: Sequence[Tensor], op: object) -> Tensor:
    """Reduce one flat tensor of each rank, alike in size and dtype, in the order of Gloo's ring."""
    size, fold, total = len(tensors), fold_of(op), torch.empty_like(tensors[0])
    step = _part_numel(total, size)
    for part in range(size):
        place = slice(part * step, (part + 1) * step)
        found = tensors[part - 1][place].clone()
        for before in range(2, size + 1):
            found = fold(found, tensors[(part - before) % size][place])
        total[place] = found
    return total


def _part_numel(tensor: Tensor, num_ranks: int) -> int:
    """Return the elements of a rank's part: whole segments, at least two of each rank."""
    item, num_bytes = tensor.itemsize, tensor.nbytes
    most = item * max(1, _SEGMENT_BYTES // item)
    segments = _rounded_up(max(-(-num_bytes // most), 2 * num_ranks), num_ranks)
    segment = _rounded_up(-(-num_bytes // segments), item)
    return max(1, segments // num_ranks * segment // item)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Operation:
    """One operation: the method of its name computes for the ranks, whose calls these are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._root = calls[calls[0].root]

    def all_reduce(self) -> None:
        for parts, total in self._totals():
            for part in parts:
                write(part, total)

    def reduce(self) -> None:
        for target, (_, total) in zip(self._root.inputs, self._totals(), strict=True):
            write(target, total)

    def broadcast(self) -> None:
        for call in self._calls:
            if call is not self._root:
                for target, source in zip(call.inputs, self._root.inputs, strict=True):
                    write(target, raw(source))

    def all_gather(self) -> None:
        calls = self._calls
        given = {(s.rank, rank): one for s in calls for rank, one in s.gives(len(calls)).items()}
        taken = {(rank, r.rank): slot for r in calls for rank, slot in r.takes().items()}
        if given.keys() != taken.keys():
            raise ValueError("each rank must have a tensor for each, and room for what each gives")
        copies = [(calls[r], slot, calls[s], given[s, r]) for (s, r), slot in taken.items()]
        for one in copies:
            _check_numel(*one)
        sources = unaliased((source for *_, source in copies), taken.values())  # read before
        for slot, source in zip(taken.values(), sources, strict=True):
            write(slot, source)

    gather = scatter = all_to_all = all_to_all_single = all_gather

    def all_gather_single(self) -> None:
        calls = self._calls
        targets = [output for call in calls for output in call.outputs]
        for k in range(len(calls[0].inputs)):
            sources = unaliased([call.inputs[k] for call in calls], targets)
            gathered = torch.cat([source.reshape(-1) for source in sources])
            for call in calls:
                write(call.outputs[k], gathered)

    def reduce_scatter(self) -> None:
        for call in self._calls:
            _check_numel(call, call.outputs[0], call, call.inputs[call.rank])
        totals = [total for _, total in self._totals()]
        for call in self._calls:
            write(call.outputs[0], totals[call.rank])

    def reduce_scatter_single(self) -> None:
        totals = [total.reshape(len(self._calls), -1) for _, total in self._totals()]
        for call in self._calls:
            for output, total in zip(call.outputs, totals, strict=True):
                write(output, total[call.rank])

    def barrier(self) -> None:
        pass

    monitored_barrier = barrier

    def _totals(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Yield for each tensor of a call the ranks' tensors, and what they reduce to."""
        for parts in zip(*(call.inputs for call in self._calls), strict=True):
            yield parts, reduce_tensors([raw(part) for part in parts], self._calls[0].reduce_op)


def _check_numel(receiver: Call, slot: Tensor, sender: Call, source: Tensor) -> None:
    if slot.numel() != source.numel() or slot.dtype != source.dtype:
        raise Disagreement(
            sender,
            receiver,
            f"rank {sender.rank} of the group gives {describe_tensor(source)}, but rank "
            f"{receiver.rank} of the group has room for {describe_tensor(slot)} there",
        )


@dataclass(slots=True, eq=False)
class Meeting:
    """One operation that some ranks of a group have called and others not yet."""

    channel: "Channel"
    number: int
    calls: list[Call | None]
    done: bool = False
    finished: Sequence[torch.cuda.Event | None] = ()
    source: int = -1

    def missing(self) -> tuple[int, ...]:
        """Return the group ranks that have not called yet."""
        return tuple(i for i, call in enumerate(self.calls) if call is None)

    def is_done(self) -> bool:
        """Whether the results are there."""
        return self.done


@dataclass(slots=True, eq=False)
class Transfer(Meeting):
    """A send or a receive; `calls` holds the one call."""

    peer: int = ANY_SOURCE

    def missing(self) -> tuple[int, ...]:
        """Return the peer's group rank; none for a receive from anybody."""
        return () if self.peer == ANY_SOURCE else (self.peer,)


@dataclass(slots=True, eq=False)
class Channel:
    """The state of one group that all its ranks share."""

    name: str
    global_ranks: tuple[int, ...]
    threads: tuple[int, ...]
    generation: int = 0
    is_like_gloo: bool = False
    _counts: list[int] = field(init=False)
    _transfer_counts: list[int] = field(init=False)
    _open: dict[int, Meeting] = field(default_factory=dict)
    _sends: list[Transfer] = field(default_factory=list)
    _recvs: list[Transfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * len(self.global_ranks)
        self._transfer_counts = [0] * len(self.global_ranks)

    def __str__(self) -> str:
        return describe_group(self.name, self.global_ranks)

    def count(self, rank: int) -> int:
        """Return how many collectives this rank of the group has called."""
        return self._counts[rank]

    def join(self, call: Call) -> Meeting:
        """Add one rank's collective; if it is the last, compute. Another call is a Disagreement."""
        size = len(self.global_ranks)
        self._counts[call.rank] += 1
        number = self._counts[call.rank]
        meeting = self._open.get(number)
        if meeting is None:
            meeting = self._open[number] = Meeting(self, number, [None] * size)
        else:
            expected = next((c for c in meeting.calls if c is not None), call)
            if call.agreed != expected.agreed:
                raise Disagreement(call, expected, "")
        meeting.calls[call.rank] = call
        calls = [c for c in meeting.calls if c is not None]
        if len(calls) == size:
            del self._open[number]
            join_streams([c.posted for c in calls])
            with for_all_ranks(), torch.inference_mode():
                self._carry_out(call.op, calls)
            meeting.finished = _mark(calls)
            meeting.done = True
            meeting.calls.clear()  # with tensors of ranks that go on while others still wait
        return meeting

    def _carry_out(self, op: str, calls: Sequence[Call]) -> None:
        if op == "all_reduce" and self.is_like_gloo:
            all_reduce_in_ring(calls)
        else:
            getattr(_Operation(calls), op)()

    def transfer(self, call: Call) -> Transfer:
        """Add one rank's send or receive; if its counterpart is there, copy."""
        self._transfer_counts[call.rank] += 1
        number = self._transfer_counts[call.rank]
        mine = Transfer(self, number, [call], peer=call.root)
        is_send = call.op == "send"
        waiting, queue = (self._recvs, self._sends) if is_send else (self._sends, self._recvs)
        for other in waiting:
            if _only_call(other).tag == call.tag and _are_partners(call, _only_call(other)):
                waiting.remove(other)
                send, recv = (mine, other) if is_send else (other, mine)
                _deliver(send, recv, here=call)
                return mine
        queue.append(mine)
        return mine

    def settle(self) -> bool:
        """Whether all ranks have called as many collectives; open messages are taken back."""
        self._sends, self._recvs = [], []
        return not self._open and len(set(self._counts)) <= 1

    def withdraw(self, rank: int) -> None:
        """Take back this rank's calls that no peer has met yet, whose tensors may be used again."""
        for meeting in self._open.values():
            meeting.calls[rank] = None
        self._sends = [send for send in self._sends if _only_call(send).rank != rank]
        self._recvs = [recv for recv in self._recvs if _only_call(recv).rank != rank]


def _mark(calls: Sequence[Call]) -> list[torch.cuda.Event | None]:
    """Mark the streams that the results were computed on: one rank's, on every rank's device."""
    return mark_streams(tensor for call in calls for tensor in (*call.outputs, *call.inputs))


def _only_call(transfer: Transfer) -> Call:
    call = transfer.calls[0]
    assert call is not None
    return call


def _are_partners(one: Call, other: Call) -> bool:
    return one.root in (ANY_SOURCE, other.rank) and other.root in (ANY_SOURCE, one.rank)


def _deliver(send: Transfer, recv: Transfer, here: Call) -> None:
    sent, received = _only_call(send), _only_call(recv)
    if message_key(sent.inputs) != message_key(received.outputs):
        there = received if here is sent else sent
        raise Disagreement(here, there, "")
    join_streams([sent.posted, received.posted])
    with torch.inference_mode():
        for target, source in zip(received.outputs, sent.inputs, strict=True):
            write(target, raw(source))
    recv.source = sent.rank
    send.finished = recv.finished = _mark([sent, received])
    send.done = recv.done = True
