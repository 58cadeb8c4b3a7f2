"""Messages between two ranks of a group: sent as copies, found by source and tag.

A send is over once its copy is shown, on the sender's board. The receiver takes note of all that is
shown to it, in order, and reads a message when a receive asks for its tag. Where many wait for
receives that have not come, they are copied out, so that later ones can be shown.
"""

from typing import NamedTuple

from torch import Tensor

from lightning_shard.backends.calls import Call
from lightning_shard.backends.packing import raw, write
from lightning_shard.backends.python_group import ANY_SOURCE
from lightning_shard.backends.shm.board import NUM_MESSAGES, HeapPlace, Letter
from lightning_shard.backends.shm.room import DTYPE_NUMBERS, DTYPES, STAGED_LIMIT_BYTES, Room
from lightning_shard.errors import CollectiveMismatchError

_MOST_UNREAD = NUM_MESSAGES // 2


class _Waiting(NamedTuple):
    """A message that no receive has asked for yet; `data` once it was copied out."""

    source: int
    number: int
    letter: Letter
    data: Tensor | None


class Mail:
    """One rank's messages in a group.

    Args:
        room: The group's room.
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
            offset = room.heap.offset_of(copy)
            assert offset is not None
            place = offset
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
        """Return the source of the message that a receive has got, or None before it has.

        Raises:
            CollectiveMismatchError: The message has another size or dtype.
        """
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
