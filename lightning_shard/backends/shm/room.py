"""Where the ranks of one group meet: rounds of offers on their boards, and what each has read.

    post      a rank offers its tensors, in place or as copies, as soon as it calls
    turn      every rank has posted, and this rank has read all rounds before: it reads
    drained   every rank has read: what was offered in place may be written again

Rounds are read in order, and posted ahead of that, so a peer that is late finds everything here.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.calls import Call
from lightning_shard.backends.packing import raw, write
from lightning_shard.backends.python_group import ANY_SOURCE, COLLECTIVES
from lightning_shard.backends.shm.board import (
    MOST_PLACES,
    NUM_MESSAGES,
    NUM_ROUNDS,
    Board,
    HeapPlace,
    Letter,
    Offer,
    num_words,
)
from lightning_shard.backends.shm.heap import Heap
from lightning_shard.backends.shm.peers import meet
from lightning_shard.errors import CollectiveMismatchError

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
NO_DTYPE = -1
STAGED_LIMIT_BYTES = 128 << 20
"""How much may lie copied in the heap before older rounds have been read."""

_OPERATION_NAMES = [*dict.fromkeys(COLLECTIVES.values()), "monitored_barrier", "gather_common"]
_ALIGN_BYTES = 64


class Offered(NamedTuple):
    """A rank's tensors in the heap; `copies` is None where all lie there as they are."""

    places: list[HeapPlace]
    copies: Tensor | None
    in_place: bool


class Room:
    """One rank's end of a group: its own board, and its peers'."""

    def __init__(self, heap: Heap, store: Store, rank: int, size: int) -> None:
        self.heap, self.rank, self.size = heap, rank, size
        self._memory = heap.empty(num_words(size), torch.int64).zero_()
        heaps, offsets = meet(store, rank, size, _offset(heap, self._memory))
        self.boards = [Board(*pair, size) for pair in zip(heaps, offsets, strict=True)]
        self.own = self.boards[rank]
        self._others = [board for board in self.boards if board is not self.own]
        self._next = 0
        self._copies: list[tuple[int, Tensor]] = []  # each with a round that reads it

    # --- rounds ---------------------------------------------------------------------------------

    def reserve(self, count: int = 1) -> int:
        """Return the number of the next round, the first of so many that one operation takes."""
        first, self._next = self._next, self._next + count
        return first

    @property
    def read_by_all(self) -> int:
        """Number of rounds that every rank has read; who has left reads no more."""
        reads = [board.read for board in self._others if not board.has_left]
        return min([self.own.read, *reads])

    def may_post(self, number: int, num_bytes: int) -> bool:
        """Whether there is room for an offer of so many bytes of copies."""
        read = self.read_by_all
        self._copies = [one for one in self._copies if one[0] >= read]
        if number >= read + NUM_ROUNDS:
            return False
        staged = sum(copy.nbytes for _, copy in self._copies)
        return not staged or staged + num_bytes <= STAGED_LIMIT_BYTES or number <= read

    def offer(self, tensors: Sequence[Tensor], written: Sequence[Tensor] = ()) -> Offered:
        """Bring tensors of one dtype to where peers can read them.

        What overlaps a tensor that this rank writes before its peers have read is copied.
        """
        places, others = dict[int, HeapPlace](), list[int]()
        for index, tensor in enumerate(tensors):
            offset = self.heap.offset_of(tensor) if tensor.is_contiguous() else None
            if offset is None or any(_overlap(tensor, one) for one in written):
                others.append(index)
            else:
                places[index] = HeapPlace(offset, tensor.numel())
        copies = None
        if sum(tensors[index].numel() for index in others):
            copies = self.heap.empty(sum(_room_for(tensors[index]) for index in others), torch.int8)
            start = 0
            for index in others:
                tensor = raw(tensors[index])
                target = copies[start : start + tensor.nbytes].view(tensor.dtype)
                target.view(tensor.shape).copy_(tensor)
                places[index] = HeapPlace(_offset(self.heap, copies) + start, tensor.numel())
                start += _room_for(tensor)
        for index in others:
            places.setdefault(index, HeapPlace(0, 0))
        in_place = len(others) < len(tensors)
        return Offered([places[index] for index in range(len(tensors))], copies, in_place)

    def post(self, number: int, call: Call, offered: Offered) -> None:
        """Show an offer to the peers."""
        places, tensors = offered.places, call.inputs or call.outputs
        if offered.copies is not None:
            self._copies.append((number, offered.copies))
        dtype = DTYPE_NUMBERS[tensors[0].dtype] if tensors else NO_DTYPE
        head = _code(call.agreed), _OPERATION_NAMES.index(call.op), dtype
        if len(places) > MOST_PLACES:
            table = self.heap.empty(2 * len(places), torch.int64)
            table.copy_(torch.tensor([word for place in places for word in place]))
            self._copies.append((number, table))
            places = [HeapPlace(_offset(self.heap, table), -len(places))]
        self.own.post(number, Offer(*head, places))
        self.ring()

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not posted a round."""
        return [rank for rank, board in enumerate(self.boards) if not board.has_posted(number)]

    def is_turn(self, number: int) -> bool:
        """Whether this rank can read a round now."""
        if self.own.read != number:
            return False
        return all(board.has_posted(number) for board in self.boards)

    def undrained(self, number: int) -> list[int]:
        """Return the ranks that have still to read a round."""
        return [
            rank
            for rank, board in enumerate(self.boards)
            if board.read <= number and not board.has_left
        ]

    def check(self, number: int, call: Call) -> None:
        """Raise unless every rank has made the same call."""
        own = self.own.code(number)
        if all(board.code(number) == own for board in self._others):
            return
        calls = "; ".join(
            f"rank {rank} {_describe(board.offer(number))}"
            for rank, board in enumerate(self.boards)
        )
        raise CollectiveMismatchError(
            f"Rank {self.rank} of the group, {call} at {call.site}: the ranks called different "
            f"operations, or the same with different shapes, dtypes, roots or reductions, expected "
            f"the same from each: {calls}. Pass debug=True to see each rank's line."
        )

    def places(self, number: int, rank: int) -> Sequence[HeapPlace]:
        """Return where a rank's tensors of a round lie in its heap."""
        board = self.boards[rank]
        places = board.offer(number).places
        if len(places) == 1 and places[0].numel < 0:
            words = board.heap.words(places[0].offset, -2 * places[0].numel).tolist()
            return [HeapPlace(*pair) for pair in zip(words[::2], words[1::2], strict=True)]
        return places

    def view(self, rank: int, place: HeapPlace, dtype: torch.dtype) -> Tensor:
        """Return a rank's tensor as 1-D, where it lies."""
        return self.boards[rank].heap.view(place.offset, place.numel, dtype)

    def has_read(self, number: int) -> None:
        """Say that this rank has read a round."""
        self.own.read = number + 1
        self.ring()

    def ring(self) -> None:
        """Wake every peer that sleeps."""
        for board in self._others:
            board.heap.doorbell.ring()

    @property
    def all_have_left(self) -> bool:
        """Whether no peer looks at this rank's board any more."""
        return all(board.has_left or board.heap.has_ended for board in self._others)

    def leave(self) -> None:
        """Say that this rank calls nothing more."""
        self.own.leave()
        self.ring()


def _offset(heap: Heap, tensor: Tensor) -> int:
    offset = heap.offset_of(tensor)
    assert offset is not None
    return offset


def _room_for(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _overlap(one: Tensor, other: Tensor) -> bool:
    if not other.is_contiguous():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return begin < other_begin + other.nbytes and other_begin < begin + one.nbytes


@lru_cache(maxsize=4096)
def _code(agreed: tuple[object, ...]) -> int:
    return zlib.crc32(repr(agreed).encode())


def _describe(offer: Offer) -> str:
    dtype = "" if offer.dtype == NO_DTYPE else f"({str(DTYPES[offer.dtype])[6:]})"
    return f"called {_OPERATION_NAMES[offer.operation]}{dtype}"


_MOST_UNREAD = NUM_MESSAGES // 2


class _Waiting(NamedTuple):
    """A message that no receive has asked for yet; `data` once it was copied out."""

    source: int
    number: int
    letter: Letter
    data: Tensor | None


class Mail:
    """One rank's messages in a group: sent as copies, found by source and tag.

    A send is over once its copy is shown. The receiver notes all that is shown to it, in order, and
    reads a message when a receive asks for its tag; where many wait, they are copied out.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._sent = [0] * room.size
        self._noted = [0] * room.size
        self._copies: list[tuple[int, int, Tensor]] = []  # peer, number
        self._waiting: list[_Waiting] = []
        self._asked: list[Call] = []  # in the order of their receives
        self._found: dict[int, int | CollectiveMismatchError] = {}  # by the receive's id

    def number(self, peer: int) -> int:
        """Return the number of the next message to a peer."""
        number, self._sent[peer] = self._sent[peer], self._sent[peer] + 1
        return number

    def may_send(self, peer: int, number: int, num_bytes: int) -> bool:
        """Whether there is room for a message of so many bytes."""
        room, boards = self._room, self._room.boards
        self._copies = [
            one for one in self._copies if not boards[one[0]].has_read(room.rank, one[1])
        ]
        staged = sum(copy.nbytes for _, _, copy in self._copies)
        if staged and staged + num_bytes > STAGED_LIMIT_BYTES:
            return False
        before = number - NUM_MESSAGES
        return before < 0 or boards[peer].has_read(room.rank, before)

    def send(self, peer: int, number: int, tensor: Tensor, tag: int) -> None:
        """Show a copy of a tensor to a peer."""
        room, place = self._room, 0
        if tensor.numel():
            copy = room.heap.empty(tensor.numel(), tensor.dtype)
            copy.view(tensor.shape).copy_(raw(tensor))
            self._copies.append((peer, number, copy))
            place = _offset(room.heap, copy)
        letter = Letter(tag, DTYPE_NUMBERS[tensor.dtype], tensor.numel(), place)
        room.own.send(peer, number, letter)
        room.boards[peer].heap.doorbell.ring()

    def _note(self) -> None:
        """Take note of the messages that have come."""
        room = self._room
        for source, board in enumerate(room.boards):
            while (letter := board.letter(room.rank, self._noted[source])) is not None:
                self._waiting.append(_Waiting(source, self._noted[source], letter, None))
                self._noted[source] += 1
        if len(self._waiting) > _MOST_UNREAD:
            self._waiting = [self._copied_out(one) for one in self._waiting]

    def ask(self, call: Call) -> None:
        """Take note of a receive; among those of one source and tag, messages go to the first."""
        self._asked.append(call)

    def receive(self, call: Call) -> int | None:
        """Return the source of the message that a receive has got, or None before it has."""
        self._note()
        for asked in list(self._asked):
            self._answer(asked)
        found = self._found.pop(id(call), None)
        if isinstance(found, CollectiveMismatchError):
            raise found
        return found

    def _answer(self, call: Call) -> None:
        for index, one in enumerate(self._waiting):
            if one.letter.tag == call.tag and call.root in (ANY_SOURCE, one.source):
                del self._waiting[index]
                self._asked = [asked for asked in self._asked if asked is not call]
                self._found[id(call)] = one.source
                try:
                    self._deliver(one, call)
                except CollectiveMismatchError as error:
                    self._found[id(call)] = error
                return

    def _deliver(self, one: _Waiting, call: Call) -> None:
        target, dtype = call.outputs[0], DTYPES[one.letter.dtype]
        if (one.letter.numel, dtype) != (target.numel(), target.dtype):
            raise CollectiveMismatchError(
                f"Rank {call.rank} of the group, {call} at {call.site}: rank {one.source} sent "
                f"{one.letter.numel} elements of {str(dtype)[6:]}, expected {target.numel()} of "
                f"{str(target.dtype)[6:]}. Send and receive tensors of the same shape and dtype."
            )
        if target.numel():
            write(target, self._data(one))
        self._acknowledge(one)

    def _data(self, one: _Waiting) -> Tensor:
        if one.data is not None:
            return one.data
        place = HeapPlace(one.letter.place, one.letter.numel)
        return self._room.view(one.source, place, DTYPES[one.letter.dtype])

    def _copied_out(self, one: _Waiting) -> _Waiting:
        if one.data is not None:
            return one
        copied = one._replace(data=self._data(one).clone())
        self._acknowledge(one)
        return copied

    def _acknowledge(self, one: _Waiting) -> None:
        if one.data is None:
            self._room.own.acknowledge(one.source, one.number)
            self._room.boards[one.source].heap.doorbell.ring()
