"""Comparing sends with their receives, without making either wait for the other to be posted.

    sender      starts to send ─► posts a fingerprint ............... waits: taken down? sent?
    receiver    irecv ─ ─ ─ ─ ─ ─ ─ ─► finds it, compares ─► takes it down ─► starts to receive

A receive starts only when its send has been compared, since Gloo ends the process when more arrives
than was expected. Until then a thread looks for the fingerprint: the caller may do anything, even
wait for its own send. A receive from any source takes the first rank that it finds, and so is
compared as well.
"""

import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from lightning_shard.backends.calls import Call
from lightning_shard.backends.debug_wrapper.bulletin import Bulletin, growing_pauses
from lightning_shard.backends.debug_wrapper.fingerprint import Fingerprint
from lightning_shard.backends.liveness.interruption import end_at_exit
from lightning_shard.backends.mismatch import Side, describe_disagreement
from lightning_shard.backends.python_group import ANY_SOURCE


class ComparedReceive:
    """A receive that has been asked for; its `work` is set once the transfer has started."""

    def __init__(self, call: Call, mine: Fingerprint, num_ranks: int) -> None:
        self.call, self.mine = call, mine
        others = [rank for rank in range(num_ranks) if rank != call.rank]
        self.sources = others if call.root == ANY_SOURCE else [call.root]
        self.work: dist.Work | None = None
        self.source = call.root
        self.failure: Exception | None = None
        self.settled = threading.Event()


class ComparedMessages:
    """The sends and receives of one rank in one group.

    Args:
        bulletin: Board of the group, on which senders post fingerprints.
        looking: The same board over another connection, for the thread that polls it.
        inner: The group that carries the messages.
    """

    def __init__(self, bulletin: Bulletin, looking: Bulletin, inner: dist.ProcessGroup) -> None:
        self._bulletin, self._looking, self._inner = bulletin, looking, inner
        self._sent: Counter[tuple[int, int | None]] = Counter()
        self._received: Counter[tuple[int, int | None]] = Counter()
        self._open: list[ComparedReceive] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, call: Call) -> "SentWork":
        """Start to send, and post what is sent; in this order, since a group may refuse to send."""
        board, mine = self._bulletin, Fingerprint.of(call, self._inner.size())
        board.raise_known_problem(f"{mine.operation} at {mine.site}")
        with self._lock:
            work = self._inner.send(list(call.inputs), call.root, call.tag or 0)
            self._sent[call.root, call.tag] += 1
            number = self._sent[call.root, call.tag]
            key = f"message/{board.rank}/{call.root}/{call.tag}/{number}"
            board.post(key, mine)
        return SentWork(board, key, call, mine, work)

    def receive(self, call: Call) -> "ReceivedWork":
        """Receive as soon as the send has been posted and compared."""
        board, mine = self._bulletin, Fingerprint.of(call, self._inner.size())
        board.raise_known_problem(f"{mine.operation} at {mine.site}")
        awaited = ComparedReceive(call, mine, self._inner.size())
        with self._lock:
            if call.root != ANY_SOURCE and call.outputs[0].is_cuda:
                # NCCL's order is that of the streams: what is started later may wait for ever.
                self._begin(awaited, call.root)
            self._open.append(awaited)
            self._poll()
            if self._open and self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep_polling, name="lightning-shard-receives", daemon=True
                )
                end_at_exit(self._thread, partial(_clear, self._lock, self._open))
                self._thread.start()
        return ReceivedWork(board, awaited)

    def _keep_polling(self) -> None:
        pauses, before = growing_pauses(), 0
        while True:
            time.sleep(next(pauses))
            with self._lock:
                self._poll()
                if not self._open:
                    self._thread = None
                    return
                if len(self._open) != before:  # something moves: look sooner
                    pauses, before = growing_pauses(), len(self._open)

    def _poll(self) -> None:
        """Start every receive whose send has been posted, in the order in which they were asked."""
        absent: set[str] = set()
        for awaited in list(self._open):
            try:
                found = self._find_send(awaited, absent)
                if found is not None:
                    self._settle(awaited, *found)
            except Exception as error:
                awaited.failure = error
            if awaited.failure is not None or awaited.settled.is_set():
                self._open.remove(awaited)
                awaited.settled.set()

    def _find_send(self, awaited: ComparedReceive, absent: set[str]) -> tuple[int, str] | None:
        """Return the first source that has posted, and its key; note the others' keys as absent."""
        tag = awaited.call.tag
        for source in awaited.sources:
            number = self._received[source, tag] + 1
            key = f"message/{source}/{self._looking.rank}/{tag}/{number}"
            if key not in absent and self._looking.holds(key):
                return source, key
            # A later receive must not take what an earlier one has just missed.
            absent.add(key)
        return None

    def _settle(self, awaited: ComparedReceive, source: int, key: str) -> None:
        board, mine = self._looking, awaited.mine
        self._received[source, awaited.call.tag] += 1
        sent = board.read([key])[0]
        if sent.agreed != mine.agreed:
            ranks = board.global_ranks
            self._bulletin.announce(
                describe_disagreement(
                    board.group,
                    self._received[source, awaited.call.tag],
                    got=Side(rank=ranks[board.rank], operation=mine.operation, site=mine.site),
                    expected=Side(rank=ranks[source], operation=sent.operation, site=sent.site),
                    what="a message does not fit its receive",
                )
            )
        elif awaited.work is None:
            self._begin(awaited, source)
        awaited.settled.set()
        if sent.agreed == mine.agreed:
            board.remove(key)

    def _begin(self, awaited: ComparedReceive, source: int) -> None:
        call = awaited.call
        awaited.source = source
        awaited.work = self._inner.recv(list(call.outputs), source, call.tag or 0)


def _clear(lock: threading.Lock, opened: list[ComparedReceive]) -> None:
    with lock:
        opened.clear()


class MessageWork(dist.Work):
    """One side of a message: waits until it has been compared, and then until it has moved."""

    def __init__(self, board: Bulletin, call: Call, mine: Fingerprint) -> None:
        super().__init__()
        self._board, self._call, self._mine = board, call, mine
        self._is_over = False

    def _compared(self) -> dist.Work:
        """Wait until the two sides have been compared; return the handle of the transfer."""
        raise NotImplementedError

    def _late(self) -> str:
        board, mine = self._board, self._mine
        peer = "any rank" if self._call.root < 0 else f"rank {board.global_ranks[self._call.root]}"
        return (
            f"Rank {board.global_rank} has waited {board.timeout} in {mine.operation} of "
            f"{board.group} at {mine.site}: {peer} has not come to the other end of it. Look for a "
            "rank that returned early, took another branch, or uses another tag."
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors may be used again.

        Raises:
            CollectiveMismatchError: The send does not fit its receive.
            RankFailedError: The peer has failed, or has not come in time.
        """
        if not self._is_over:  # Gloo would wait for another message
            self._compared().wait(*(() if timeout is None else (timeout,)))
            self._is_over = True
        return True

    def synchronize(self) -> None:
        """Wait until the message has moved, as `wait`."""
        self.wait()

    def exception(self) -> None:
        """Return None: errors are raised by `wait`."""

    def result(self) -> list[Any]:
        """Wait, and return the tensors that were written."""
        self.wait()
        return list(self._call.results)

    def get_future(self) -> Future[Any]:
        """Wait, and return a future that is done."""
        tensors = self.result()
        on_gpu: list[Any] = [t.device for t in tensors if t.is_cuda]
        future: Future[Any] = Future(devices=on_gpu[:1] or None)
        future.set_result(tensors)
        return future


class SentWork(MessageWork):
    """The handle of a send."""

    def __init__(
        self, board: Bulletin, key: str, call: Call, mine: Fingerprint, work: dist.Work
    ) -> None:
        super().__init__(board, call, mine)
        self._key, self._work = key, work

    def _compared(self) -> dist.Work:
        place = f"{self._mine.operation} at {self._mine.site}"
        self._board.wait_until(lambda: not self._board.holds(self._key), place, self._late)
        return self._work

    def is_completed(self) -> bool:
        """Whether the message has been compared and sent."""
        return not self._board.holds(self._key) and self._work.is_completed()


class ReceivedWork(MessageWork):
    """The handle of a receive."""

    def __init__(self, board: Bulletin, awaited: ComparedReceive) -> None:
        super().__init__(board, awaited.call, awaited.mine)
        self._awaited = awaited

    def _compared(self) -> dist.Work:
        awaited, place = self._awaited, f"{self._mine.operation} at {self._mine.site}"
        self._board.wait_until(awaited.settled.is_set, place, self._late)
        if awaited.failure is not None:
            raise awaited.failure
        self._board.raise_known_problem(place)
        assert awaited.work is not None
        return awaited.work

    def is_completed(self) -> bool:
        """Whether the message has been compared and received."""
        work = self._awaited.work
        return self._awaited.settled.is_set() and work is not None and work.is_completed()

    def source_rank(self) -> int:
        """Return the group rank that sent the message."""
        self.wait()
        return self._awaited.source

    _source_rank = source_rank
