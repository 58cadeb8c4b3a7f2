"""What happens before what on a device: memory that is used without an order is a race.

    host      launch ─────── launch ────────── finish ── reads pinned memory
                 │              │                 ▲
    stream    ───▼── writes ──┬─▼──────── follows ┼─── reads
                              │ mark        ▲     │
    side      ────────────────▼── reads ────┴ mark┘

The host, each stream and each process group do one thing after the other. Beyond that only these
order anything: what is launched comes after what the host has done, marks (events) that a stream
follows or the host waits for, and the handles of collectives, whose `wait` a stream follows. Each
has a clock that counts its own doings and knows how far it has followed the others (vector clocks).
Two uses of the same bytes, one of them a write, of which neither is before the other, are a race.

Memory of the device is given to others as soon as nobody has it: from then on the stream on which
it was made may use it. So that stream must have followed all uses by then, but those of streams for
which it is kept. To make memory is a write, for the same reason. Pinned memory is torch's host
allocator's, which keeps it for the streams that use it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict["Agent", int]


@dataclass(eq=False)
class Agent:
    """Does one thing after the other: the host, a stream, a process group.

    Attributes:
        clock: How much it has done, and how far it has followed the others.
    """

    name: str
    clock: Clock = field(default_factory=dict)

    def follow(self, clock: Clock) -> None:
        """Do what comes only after another has done what its clock says."""
        for agent, done in clock.items():
            self.clock[agent] = max(self.clock.get(agent, 0), done)

    def tick(self) -> int:
        """Do something; return its number."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]


class Span(NamedTuple):
    """Some bytes of a memory.

    Attributes:
        stop: One past the last byte.
    """

    key: int
    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        """Whether both have a byte of the same memory."""
        return self.key == other.key and self.start < other.stop and other.start < self.stop


class Use(NamedTuple):
    """What was done with a span.

    Attributes:
        number: What its clock said then.
    """

    span: Span
    agent: Agent
    number: int
    writes: bool
    what: str

    def is_before(self, clock: Clock) -> bool:
        """Whether it is over for one whose clock says so."""
        return clock.get(self.agent, 0) >= self.number


class Race(NamedTuple):
    """Two uses of the same bytes without an order."""

    first: str
    second: str


@dataclass
class _Memory:
    made_by: Agent | None  # whose stream's it is again, once nobody has it; None for the host's
    uses: list[Use] = field(default_factory=list)
    kept_for: set[Agent] = field(default_factory=set)


class Order:
    """The clocks of the host, streams and groups, and all uses of memory that still count."""

    def __init__(self) -> None:
        self.host = Agent("host")
        self.races: Counter[Race] = Counter()
        self.num_uses = 0
        self._memories: dict[int, _Memory] = {}
        self._lock = threading.RLock()  # backward's hooks run on a thread of the device

    def knows(self, key: int) -> bool:
        """Whether a memory's uses are looked at."""
        return key in self._memories

    def made(self, key: int, num_bytes: int, by: Agent | None, what: str) -> None:
        """Note new memory, which the stream `by` has made; None for memory of the host."""
        with self._lock:
            self._memories[key] = _Memory(by)
            if by is not None:
                self.launch(by, [], [Span(key, 0, max(num_bytes, 1))], what)

    def launch(
        self, agent: Agent, reads: Iterable[Span], writes: Iterable[Span], what: str
    ) -> None:
        """Have an agent do something, after all that the host has done."""
        with self._lock:
            agent.follow(self.host.clock)
            number = agent.tick()
            for writing, spans in ((False, reads), (True, writes)):
                for span in spans:
                    self._use(Use(span, agent, number, writing, what))

    def _use(self, use: Use) -> None:
        memory = self._memories.get(use.span.key)
        if memory is None:
            return
        self.num_uses += 1
        clock, left = use.agent.clock, []
        for other in memory.uses:
            meets, is_before = other.span.meets(use.span), other.is_before(clock)
            if meets and not is_before and (use.writes or other.writes):
                self._found(other, use)
            covers = use.span.start <= other.span.start and other.span.stop <= use.span.stop
            if not (covers and is_before and (use.writes or not other.writes)):
                left.append(other)  # else who comes after this use comes after that one, too
        memory.uses = [*left, use]

    def _found(self, first: Use, second: Use) -> None:
        says = [f"{use.agent.name} {_DOES[use.writes]}: {use.what}" for use in (first, second)]
        self.races[Race(*says)] += 1

    def keep(self, key: int, agent: Agent) -> None:
        """Keep a memory from others until an agent has done what it has been asked by then."""
        if key in self._memories:
            self._memories[key].kept_for.add(agent)

    def freed(self, key: int, what: str) -> None:
        """Note that nobody has a memory any more."""
        with self._lock:
            memory = self._memories.pop(key, None)
            if memory is None or memory.made_by is None:
                return
            maker = Agent(memory.made_by.name, {**memory.made_by.clock})
            maker.follow(self.host.clock)
            reuse = Use(Span(key, 0, 1), maker, 0, True, f"reuse, freed by {what}")
            for use in memory.uses:
                if use.agent not in memory.kept_for and not use.is_before(maker.clock):
                    self._found(use, reuse)


_DOES: dict[bool, str] = {False: "reads", True: "writes"}
"""By whether it writes."""


class Marks:
    """Marks of what has been launched, to be followed later, each with what it keeps alive."""

    def __init__(self, order: Order, current: Callable[[], Agent]) -> None:
        self._order, self._current = order, current
        self._open: list[list[tuple[Clock, object]]] = []

    def begin(self) -> None:
        """Collect marks from here on."""
        self._open.append([])

    def end(self) -> list[tuple[Clock, object]]:
        """Return the marks that were made since `begin`."""
        return self._open.pop()

    def collective(
        self,
        group: Agent,
        reads: Iterable[Span],
        writes: Iterable[Span],
        what: str,
        tensors: object,
    ) -> None:
        """Have a group do something with tensors, after what the current stream has done.

        Outside of `begin` and `end` the current stream waits for it at once.
        """
        group.follow(self._current().clock)
        self._order.launch(group, reads, writes, what)
        if self._open:
            self._open[-1].append(({**group.clock}, tensors))
        else:
            self._current().follow(group.clock)

    def follow(self, marks: list[tuple[Clock, object]]) -> None:
        """Have the current stream wait for marks, which then keep nothing alive any more."""
        while marks:
            clock, _kept = marks.pop()
            self._current().follow(clock)
            del _kept  # only now may the memory be another's
