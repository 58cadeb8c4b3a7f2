"""A rank's board of one group: what it offers in each round, what it has read, what it sends.

    word     0 left   1 rounds read
    rounds   NUM_ROUNDS records: number + 1, code, operation, dtype, count, (offset, elements) ...
    outbox   for each rank NUM_MESSAGES records: number + 1, tag, dtype, elements, offset
    acks     for each rank NUM_MESSAGES words: the number + 1 of a message that has been read

Only its own rank writes a board. A record's number is written last, so that a record whose number
is there is complete: x86-64 keeps stores in order, and the words are written one by one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_shard.backends.shm.peers import PeerHeap

NUM_ROUNDS = 256
NUM_MESSAGES = 64
MOST_PLACES = 8
_RECORD = 5 + 2 * MOST_PLACES
_MESSAGE = 5
_LEFT, _READ = 0, 1
_ROUNDS = 8


class HeapPlace(NamedTuple):
    """Where a tensor lies in its rank's heap: bytes from the heap's begin, and elements."""

    offset: int
    numel: int


class Offer(NamedTuple):
    """What a rank gives in one round of a collective; `code` stands for all that must be alike."""

    code: int
    operation: int
    dtype: int
    places: Sequence[HeapPlace]


class Letter(NamedTuple):
    """A message that a rank has sent; `place` is where it lies in the sender's heap."""

    tag: int
    dtype: int
    numel: int
    place: int


def num_words(size: int) -> int:
    """Return the number of 64-bit words of a board of a group of this size."""
    return _ROUNDS + NUM_ROUNDS * _RECORD + size * NUM_MESSAGES * (_MESSAGE + 1)


class Board:
    """The board of one rank, its own or a peer's."""

    def __init__(self, heap: PeerHeap, offset: int, size: int) -> None:
        self.heap = heap
        self._words = heap.words(offset, num_words(size))
        self._outbox = _ROUNDS + NUM_ROUNDS * _RECORD
        self._acks = self._outbox + size * NUM_MESSAGES * _MESSAGE

    # --- rounds ---------------------------------------------------------------------------------

    @property
    def read(self) -> int:
        """Number of rounds whose offers this rank has read."""
        return self._words[_READ]

    @read.setter
    def read(self, number: int) -> None:
        self._words[_READ] = number

    @property
    def has_left(self) -> bool:
        """Whether this rank has left the group."""
        return bool(self._words[_LEFT])

    def leave(self) -> None:
        """Say that this rank calls nothing more in the group."""
        self._words[_LEFT] = 1

    def has_posted(self, number: int) -> bool:
        """Whether this rank's offer of a round is there."""
        return self._words[_ROUNDS + number % NUM_ROUNDS * _RECORD] == number + 1

    def post(self, number: int, offer: Offer) -> None:
        """Show this rank's offer of a round, of at most `MOST_PLACES` places."""
        start = _ROUNDS + number % NUM_ROUNDS * _RECORD
        self._write(start + 1, (offer.code, offer.operation, offer.dtype, len(offer.places)))
        self._write(start + 5, [word for place in offer.places for word in place])
        self._words[start] = number + 1

    def offer(self, number: int) -> Offer:
        """Return the offer of a round that has been posted."""
        start = _ROUNDS + number % NUM_ROUNDS * _RECORD
        code, operation, dtype, count = self._words[start + 1 : start + 5]
        words = self._words[start + 5 : start + 5 + 2 * count].tolist()
        places = [HeapPlace(*pair) for pair in zip(words[::2], words[1::2], strict=True)]
        return Offer(code, operation, dtype, places)

    def code(self, number: int) -> int:
        """Return the code of a round that has been posted."""
        return self._words[_ROUNDS + number % NUM_ROUNDS * _RECORD + 1]

    # --- messages -------------------------------------------------------------------------------

    def send(self, peer: int, number: int, letter: Letter) -> None:
        """Show this rank's message of this number to a peer."""
        start = self._outbox + (peer * NUM_MESSAGES + number % NUM_MESSAGES) * _MESSAGE
        self._write(start + 1, letter)
        self._words[start] = number + 1

    def letter(self, peer: int, number: int) -> Letter | None:
        """Return this rank's message of this number to a peer, if it is there."""
        start = self._outbox + (peer * NUM_MESSAGES + number % NUM_MESSAGES) * _MESSAGE
        if self._words[start] != number + 1:
            return None
        return Letter(*self._words[start + 1 : start + _MESSAGE])

    def acknowledge(self, peer: int, number: int) -> None:
        """Say that this rank has read a peer's message of this number."""
        self._words[self._acks + peer * NUM_MESSAGES + number % NUM_MESSAGES] = number + 1

    def has_read(self, peer: int, number: int) -> bool:
        """Whether this rank has read a peer's message of this number, or a later one there."""
        return self._words[self._acks + peer * NUM_MESSAGES + number % NUM_MESSAGES] > number

    def _write(self, start: int, values: Sequence[int]) -> None:
        for index, value in enumerate(values, start=start):
            self._words[index] = value
