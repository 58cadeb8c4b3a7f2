"""The mismatch check for real processes: ranks compare what they call before they call it.

    all_reduce ─► DebugGroup ─┬─► Comparer: what every rank calls, on the group's `Bulletin`
                              └─► the inner group (Gloo, NCCL, MPI), once all ranks agree

Else a rank that calls something else than its peers shows as a hang, wrong numbers, or an abort in
C++. Comparing a collective waits for the peers at once, also when it is asynchronous: ranks that
start operations of several groups in different order are told so after the time-out.

The inner groups are made as c10d does; `tests/backends/debug_wrapper/test_conformance.py` fails
when a private name of it changes.
"""

import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work
from typing_extensions import override

from lightning_shard.backends import _c10d, group_handle, liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import (
    Call,
    Side,
    describe_disagreement,
    describe_tensor,
    message_key,
    mismatch_error,
    tensor_key,
)
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.liveness.interruption import end_at_exit, interrupt_backend
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.python_group import (
    ANY_SOURCE,
    COLLECTIVES,
    PythonGroup,
    Tensors,
    as_list,
)
from lightning_shard.backends.rank_order import C10D_OPS, ReduceOpName
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.errors import RankFailedError

TensorSummary = tuple[str, int, str]
"""A tensor that goes from one rank to another: dtype, number of elements, description."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A rank's call, as its peers see it.

    Attributes:
        gives: By group rank, the tensor given to it, where `agreed` does not tell.
        takes: By group rank, the tensor that this rank has room for from that one.
    """

    agreed: str
    operation: str
    site: str
    gives: dict[str, TensorSummary] = field(default_factory=dict)
    takes: dict[str, TensorSummary] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, size: int) -> Self:
        """Take the fingerprint of a call in a group of `size` ranks."""
        # A message fits its receive when the tensors do; which is which, and the peer, differ.
        agreed = call.agreed if call.tag is None else message_key(call.inputs or call.outputs)
        return cls(
            agreed=repr(agreed),
            operation=str(call),
            site=f"{call.site}{_thread_note()}",
            gives=_summaries(call.gives(size)),
            takes=_summaries(call.takes()),
        )

    def of_rank(self, rank: int) -> Side:
        """Return what an error tells of the call of a rank."""
        return Side(rank=rank, operation=self.operation, site=self.site)

    @property
    def place(self) -> str:
        """The call and its site in words."""
        return f"{self.operation} at {self.site}"

    def encode(self) -> str:
        """Bring into the form that `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Read what `encode` wrote."""
        return cls(**json.loads(text))


def find_misfit(calls: Sequence[Fingerprint]) -> tuple[int, int, str] | None:
    """Return two group ranks that disagree, and on what; None when the calls fit together."""
    for rank, call in enumerate(calls):
        if call.agreed != calls[0].agreed:
            return rank, 0, ""
    for source, giver in enumerate(calls):
        for target, summary in giver.gives.items():
            room = calls[int(target)].takes.get(str(source))
            if room is not None and room[:2] != summary[:2]:
                what = (
                    f"rank {source} of the group gives {summary[2]}, but rank {target} of the "
                    f"group has room for {room[2]} there"
                )
                return source, int(target), what
    return None


def _summaries(tensors: dict[int, Tensor]) -> dict[str, TensorSummary]:
    # Lists and string keys are what comes back from JSON.
    return {
        str(rank): (str(tensor.dtype), tensor.numel(), describe_tensor(tensor))
        for rank, tensor in tensors.items()
    }


def _thread_note() -> str:
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else f" in thread {thread.name!r}"


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.005
# The store ends with the process that serves it: the others must have read what it holds.
_FAREWELL_SECONDS = 5.0


def growing_pauses() -> Iterator[float]:
    """Yield seconds to sleep between two looks: short at first, a moment in the end."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


class Bulletin:
    """The board of one group, keys in its store, as one rank reads and writes it.

    checked/<n>/                          n-th group of this name on each rank
        call/<number>/<rank>              fingerprint of a collective; gone two numbers later
        message/<from>/<to>/<tag>/<k>     fingerprint of a send; gone when it is received
        problem                           what the ranks disagree on, once they do
        told/<rank>                       this rank knows of the problem
    """

    def __init__(
        self,
        store: Store,
        global_ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        described_group: str,
    ) -> None:
        self.global_ranks, self.rank, self.group = global_ranks, rank, described_group
        self.timeout = timeout
        generation = store.add(f"checked/generation/{rank}", 1)
        self._store = PrefixStore(f"checked/{generation}", store)
        self._problem = ""

    def reconnected(self) -> Self:
        """Return the same board over a connection of its own, for another thread."""
        other = copy(self)
        store: Any = self._store
        other._store = store.clone()
        return other

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.global_ranks[self.rank]

    # --- fingerprints --------------------------------------------------------------------------

    def post(self, key: str, fingerprint: Fingerprint) -> None:
        """Post the fingerprint of one of this rank's calls."""
        self._store.set(key, fingerprint.encode())

    def read(self, keys: Sequence[str]) -> list[Fingerprint]:
        """Return fingerprints that have been posted."""
        return [Fingerprint.decode(text) for text in self._store.multi_get(list(keys))]

    def holds(self, *keys: str) -> bool:
        """Whether a fingerprint is posted under each of these keys."""
        return self._store.check(list(keys))

    def remove(self, key: str) -> None:
        """Take a fingerprint down."""
        self._store.delete_key(key)

    # --- waiting -------------------------------------------------------------------------------

    def wait_until(
        self, ready: Callable[[], bool], operation: str, late: Callable[[], str]
    ) -> None:
        """Return once `ready()`; the store's own `wait` would keep its connection from threads."""
        deadline, pauses = time.monotonic() + self.timeout.total_seconds(), growing_pauses()
        try:
            while not ready():
                time.sleep(next(pauses))
                self.raise_problem(operation)
                liveness.check(operation)
                if time.monotonic() > deadline:
                    raise RankFailedError(late())
        except dist.DistNetworkError as error:
            raise RankFailedError(
                f"Rank {self.global_rank} cannot go on with {operation}: the store through which "
                "the ranks compare their calls is gone, and so is the rank that served it, which "
                f"is rank 0 as a rule. Look for its first error. torch said: {error}"
            ) from error

    # --- disagreement --------------------------------------------------------------------------

    def announce(self, problem: str) -> None:
        """Tell all ranks of the group what they disagree on."""
        self._problem = problem
        self._store.set("problem", problem)

    def raise_problem(self, operation: str) -> None:
        """Return unless the ranks of this group are known to disagree."""
        if not self._problem and self._store.check(["problem"]):
            self._problem = self._store.get("problem").decode()
        self.raise_known_problem(operation)

    def raise_known_problem(self, operation: str) -> None:
        """Raise as `raise_problem` does, but only a problem that this rank has read already."""
        if self._problem:
            self.meet_briefly("told")
            raise mismatch_error(self._problem, self.global_rank, operation)

    def meet_briefly(self, occasion: str) -> None:
        """Wait a few seconds for the other ranks to come here as well; go on if they do not."""
        deadline = time.monotonic() + min(_FAREWELL_SECONDS, self.timeout.total_seconds())
        keys, pauses = (
            [f"{occasion}/{rank}" for rank in range(len(self.global_ranks))],
            growing_pauses(),
        )
        try:
            self._store.set(keys[self.rank], "")
            while time.monotonic() < deadline and not self.holds(*keys):
                time.sleep(next(pauses))
                liveness.check(occasion)
        except (dist.DistError, RankFailedError):
            return  # who served the store has left, or a rank has failed: nobody else will come


def debug_name(backend: str) -> str:
    """Return the name under which c10d knows the debug wrapper of a backend."""
    return f"checked_{backend}"


def make_gloo(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make a Gloo group from c10d's `_DistributedBackendOptions`."""
    del backend_options
    backend: Any = dist.ProcessGroupGloo(
        _own_corner(options), options.group_rank, options.group_size, timeout=options.timeout
    )
    return _as_group(options, backend, "cpu", dist.ProcessGroup.BackendType.GLOO)


def make_nccl(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make an NCCL group from c10d's `_DistributedBackendOptions`."""
    settings: Any = backend_options or dist.ProcessGroupNCCL.Options()
    settings._timeout = options.timeout
    backend: Any = dist.ProcessGroupNCCL(
        _own_corner(options), options.group_rank, options.group_size, settings
    )
    return _as_group(options, backend, "cuda", dist.ProcessGroup.BackendType.NCCL)


def _own_corner(options: Any) -> Any:
    """Return a part of the group's store that holds no addresses of a destroyed group."""
    generation = options.store.add(f"inner/generation/{options.group_rank}", 1)
    return _c10d.PrefixStore(f"inner/{generation}", options.store)


def _as_group(options: Any, backend: Any, device_type: str, kind: Any) -> dist.ProcessGroup:
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_id
    backend._set_sequence_number_for_group()
    make_group: Any = dist.ProcessGroup
    group = make_group(options.store, options.group_rank, options.group_size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    group._set_group_name(options.group_id)
    return group  # type: ignore[no-any-return]


MakeGroup = Callable[[Any, Any], dist.ProcessGroup]
"""Makes a rank's handle of a group from c10d's `_DistributedBackendOptions` and its own options."""
_OPS: dict[str, Any] = {**C10D_OPS, "avg": ReduceOp.AVG}


class ComparedMessages:
    """The sends and receives of one rank in one group.

        sender      starts to send ─► posts a fingerprint ............... waits: taken down? sent?
        receiver    irecv ─ ─ ─ ─ ─ ─ ─ ─► finds it, compares ─► takes it down ─► starts to receive

    A receive starts only when its send has been compared, since Gloo ends the process when more
    arrives than was expected. Until then a thread looks for the fingerprint.
    """

    def __init__(self, bulletin: Bulletin, looking: Bulletin, inner: dist.ProcessGroup) -> None:
        self._bulletin, self._looking, self._inner = bulletin, looking, inner
        self._sent: Counter[tuple[int, int | None]] = Counter()
        self._received: Counter[tuple[int, int | None]] = Counter()
        self._open: list[ReceivedWork] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, call: Call) -> "SentWork":
        """Start to send, and post what is sent; in this order, since a group may refuse to send."""
        board, mine = self._bulletin, Fingerprint.of(call, self._inner.size())
        board.raise_known_problem(mine.place)
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
        board.raise_known_problem(mine.place)
        awaited = ReceivedWork(board, call, mine, self._inner.size())
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
        return awaited

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

    def _find_send(self, awaited: "ReceivedWork", absent: set[str]) -> tuple[int, str] | None:
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

    def _settle(self, awaited: "ReceivedWork", source: int, key: str) -> None:
        board, mine = self._looking, awaited.mine
        self._received[source, awaited.call.tag] += 1
        sent = board.read([key])[0]
        if sent.agreed != mine.agreed:
            ranks = board.global_ranks
            self._bulletin.announce(
                describe_disagreement(
                    board.group,
                    self._received[source, awaited.call.tag],
                    got=mine.of_rank(ranks[board.rank]),
                    expected=sent.of_rank(ranks[source]),
                    what="a message does not fit its receive",
                )
            )
        elif awaited.work is None:
            self._begin(awaited, source)
        awaited.settled.set()
        if sent.agreed == mine.agreed:
            board.remove(key)

    def _begin(self, awaited: "ReceivedWork", source: int) -> None:
        call = awaited.call
        awaited.source = source
        awaited.work = self._inner.recv(list(call.outputs), source, call.tag or 0)


def _clear(lock: threading.Lock, opened: list["ReceivedWork"]) -> None:
    with lock:
        opened.clear()


class MessageWork(group_handle.CallWork):
    """One side of a message: waits until it has been compared, and then until it has moved."""

    def __init__(self, board: Bulletin, call: Call, mine: Fingerprint) -> None:
        super().__init__(call)
        self.call, self.board, self.mine = call, board, mine
        self._is_over = False

    def _compared(self) -> dist.Work:
        """Wait until the two sides have been compared; return the handle of the transfer."""
        raise NotImplementedError

    def _late(self) -> str:
        board, mine = self.board, self.mine
        peer = "any rank" if self.call.root < 0 else f"rank {board.global_ranks[self.call.root]}"
        return (
            f"Rank {board.global_rank} has waited {board.timeout} in {mine.operation} of "
            f"{board.group} at {mine.site}: {peer} has not come to the other end of it. Look for a "
            "rank that returned early, took another branch, or uses another tag."
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors may be used again; raise if the two sides do not fit."""
        if not self._is_over:  # Gloo would wait for another message
            self._compared().wait(*(() if timeout is None else (timeout,)))
            self._is_over = True
        return True

    def _source(self) -> int:
        return self.call.root


class SentWork(MessageWork):
    """The handle of a send."""

    def __init__(
        self, board: Bulletin, key: str, call: Call, mine: Fingerprint, work: dist.Work
    ) -> None:
        super().__init__(board, call, mine)
        self._key, self._work = key, work

    def _compared(self) -> dist.Work:
        board, key = self.board, self._key
        board.wait_until(lambda: not board.holds(key), self.mine.place, self._late)
        return self._work

    def is_completed(self) -> bool:
        """Whether the message has been compared and sent."""
        return not self.board.holds(self._key) and self._work.is_completed()


class ReceivedWork(MessageWork):
    """A receive that has been asked for; its `work` is set once the transfer has started."""

    def __init__(self, board: Bulletin, call: Call, mine: Fingerprint, num_ranks: int) -> None:
        super().__init__(board, call, mine)
        others = [rank for rank in range(num_ranks) if rank != call.rank]
        self.sources = others if call.root == ANY_SOURCE else [call.root]
        self.work: dist.Work | None = None
        self.source = call.root
        self.failure: Exception | None = None
        self.settled = threading.Event()

    def _compared(self) -> dist.Work:
        self.board.wait_until(self.settled.is_set, self.mine.place, self._late)
        if self.failure is not None:
            raise self.failure
        self.board.raise_known_problem(self.mine.place)
        assert self.work is not None
        return self.work

    def is_completed(self) -> bool:
        """Whether the message has been compared and received."""
        return self.settled.is_set() and self.work is not None and self.work.is_completed()

    @override
    def _source(self) -> int:
        return self.source


class Comparer(PythonGroup):
    """A group whose operations move nothing: each returns once every rank has called the same."""

    backend_name = "comparer"

    def __init__(self, name: str, bulletin: Bulletin) -> None:
        super().__init__(name, bulletin.global_ranks, bulletin.rank)
        self._bulletin = bulletin
        self._number = 0
        self._turn = threading.RLock()
        self._in_turn = ""
        self._overlap = ""
        self._sites_seen: set[tuple[str, ...]] = set()

    def compare(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        reduce_op: Any = None,
    ) -> None:
        """Return once all ranks have called this operation with such tensors."""
        key = (tensor_key(inputs), tensor_key(outputs))
        with self.turn():
            self._post(op, inputs, outputs, agreed=key, reduce_op=reduce_op)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time compare and start its operation, in the order of its numbers."""
        name = threading.current_thread().name
        if not self._turn.acquire(blocking=False):
            self._overlap = (
                f"Threads {self._in_turn!r} and {name!r} of rank {self._bulletin.global_rank} "
                "called at the same time: their order is not the same on every rank. Call from "
                "one thread, or give each a group of its own."
            )
            self._turn.acquire()
        try:
            self._in_turn = name
            yield
        finally:
            self._turn.release()

    @override
    def _start(self, call: Call) -> Work:
        board, mine = self._bulletin, Fingerprint.of(call, self.size())
        board.raise_known_problem(mine.place)
        self._number += 1
        board.post(self._key(self._number, board.rank), mine)
        keys = [self._key(self._number, rank) for rank in range(self.size())]
        place = mine.place
        board.wait_until(partial(board.holds, *keys), place, partial(self._describe_late, mine))
        calls = board.read(keys)
        # Who has posted this number has read all of the last one, so nobody reads the one before.
        board.remove(self._key(self._number - 2, board.rank))
        self._compare(calls)
        return group_handle.CoalescedWork([])

    def _compare(self, calls: list[Fingerprint]) -> None:
        misfit = find_misfit(calls)
        if misfit is None:
            self._compare_sites(calls)
            return
        got, expected = (calls[rank].of_rank(self.global_ranks[rank]) for rank in misfit[:2])
        board = self._bulletin
        problem = describe_disagreement(
            board.group, self._number, got=got, expected=expected, what=misfit[2]
        )
        board.announce("\n".join(filter(None, (problem, self._overlap))))
        mine = calls[board.rank]
        board.raise_problem(f"{mine.operation} of {board.group} at {mine.site}")

    def _compare_sites(self, calls: list[Fingerprint]) -> None:
        """Warn once of each set of differing call sites: a branch by rank is often a mistake."""
        sites = tuple(call.site for call in calls)
        if self._bulletin.rank or len(set(sites)) == 1 or sites in self._sites_seen:
            return
        self._sites_seen.add(sites)
        places = "".join(
            f"\n  rank {rank}: {site}" for rank, site in zip(self.global_ranks, sites, strict=True)
        )
        warnings.warn(
            f"Ranks of {self._bulletin.group} called its operation number {self._number}, "
            f"{calls[0].operation}, from different places:{places}\nThey agree in all that can be "
            "compared, so it goes on; look whether they mean the same data.",
            stacklevel=2,
        )

    def _describe_late(self, mine: Fingerprint) -> str:
        board = self._bulletin
        lines = [
            f"  rank {board.global_ranks[rank]}: {self._describe_last(rank)}"
            for rank in range(self.size())
            if not board.holds(self._key(self._number, rank))
        ]
        report = "\n".join(filter(None, (*lines, self._overlap)))
        return (
            f"Rank {board.global_rank} has waited {board.timeout} in {mine.operation}, number "
            f"{self._number} of {board.group} at {mine.site}. These ranks have not come to it:\n"
            f"{report}\nLook for a rank that returned early, took another branch, or waits in "
            "another group; raise the timeout where a rank may compute for so long."
        )

    def _describe_last(self, rank: int) -> str:
        last = self._key(self._number - 1, rank)
        if not self._bulletin.holds(last):
            return "has not called anything in this group"
        call = self._bulletin.read([last])[0]
        return f"its last one was {call.operation} at {call.site}"

    def _key(self, number: int, rank: int) -> str:
        return f"call/{number}/{rank}"


def _compared(name: str) -> Callable[..., Work]:
    """Make the method with this c10d name, which compares the call and then hands it over."""

    def method(self: "DebugGroup", *args: Any, **kwargs: Any) -> Work:
        with self.comparer.turn():
            getattr(self.comparer, name)(*args, **kwargs)
            work: Work = getattr(self._inner, name)(*args, **kwargs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    method.__name__ = name
    method.__doc__ = f"Compare {name} with the other ranks', then do it."
    return method


class DebugGroup(group_handle.GroupHandle):
    """One rank's handle of a group, which compares calls before `inner` carries them out."""

    def __init__(
        self, options: Any, inner: dist.ProcessGroup, name: str, devices: Sequence[str]
    ) -> None:
        self._is_default, ranks = not options.global_ranks_in_group, group_handle.ranks_of(options)
        super().__init__(options.group_id, ranks, options.group_rank)
        self._inner, self.backend_name, self._devices = inner, name, devices
        self.shares_host = getattr(inner, "shares_host", False)
        self._bulletin = Bulletin(
            options.store,
            ranks,
            options.group_rank,
            options.timeout,
            group_handle.describe_group(options.group_id, ranks),
        )
        self.comparer = Comparer(options.group_id, self._bulletin)
        self._messages = ComparedMessages(self._bulletin, self._bulletin.reconnected(), inner)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come; comparing does just that, and names who has not."""
        with self.comparer.turn():
            self.comparer.monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        """Send to a rank of the group, and compare the send with its receive."""
        if tag >= FIRST_RESERVED_TAG:  # part of a collective that has been compared
            return self._inner.send(as_list(tensors), dst_rank, tag)
        return self._post("send", as_list(tensors), root=dst_rank, tag=tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        """Receive from a rank of the group, once the receive has been compared with the send."""
        if tag >= FIRST_RESERVED_TAG:
            return self._inner.recv(as_list(tensors), src_rank, tag)
        return self._post("recv", [], as_list(tensors), root=src_rank, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive from whichever rank sends first."""
        return self.recv(tensors, ANY_SOURCE, tag)

    @override
    def _start(self, call: Call) -> Work:
        return self._messages.send(call) if call.op == "send" else self._messages.receive(call)

    # --- the rest of c10d's questions -----------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._devices]

    @override
    def _get_sequence_number_for_group(self) -> int:
        return self.comparer._get_sequence_number_for_group()

    def interrupt(self) -> None:
        """Have every waiting operation raise; may be called from any thread."""
        for carrier in _c10d.backends_of(self._inner):
            interrupt_backend(carrier)

    @override
    def shutdown(self) -> None:
        if self._is_default:
            self._bulletin.meet_briefly("left")
        self._inner.shutdown()

    @override
    def abort(self) -> None:
        self._inner.abort()


for _name in (*COLLECTIVES, "gather_common"):
    setattr(DebugGroup, _name, _compared(_name))


def register_debug(backend: str, make_inner: MakeGroup, devices: Sequence[str]) -> None:
    """Register the debug wrapper of a backend in c10d, under `debug_name(backend)`."""
    name = debug_name(backend)

    def make_group(options: Any, backend_options: Any) -> DebugGroup:
        return DebugGroup(options, make_inner(options, backend_options), name, devices)

    _c10d.register_backend(name, make_group, devices)


if dist.is_available():
    register_debug("gloo", make_gloo, ["cpu"])
    register_debug("nccl", make_nccl, ["cuda"])


def exchange_collectives(group: dist.ProcessGroup) -> ExchangeCollectives:
    """Wrap a group in exchange collectives, for a `DebugGroup` in those that compare first."""
    return (DebugExchange if isinstance(group, DebugGroup) else ExchangeCollectives)(group)


class DebugExchange(ExchangeCollectives):
    """Exchange collectives whose ranks first compare what they call; for a `DebugGroup` alone."""

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        self._compare("all_reduce", [source], reduce_op=_OPS[op])
        return super()._all_reduce(output, source, op)

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        self._compare("reduce_scatter", [source], [output], reduce_op=_OPS[op])
        return super()._reduce_scatter(output, source, op)

    def _all_gather(self, output: Tensor, source: Tensor) -> StartedTransfer:
        self._compare("all_gather", [source])
        return super()._all_gather(output, source)

    def _compare(self, operation: str, *tensors: list[Tensor], reduce_op: Any = None) -> None:
        assert isinstance(self.group, DebugGroup)
        self.group.comparer.compare(operation, *tensors, reduce_op=reduce_op)
