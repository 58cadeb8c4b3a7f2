"""A rank's counters of traffic by axis of the mesh: what groups have counted, and since when.

    group of ranks 0 2  ─┐  which differ on the axis dp only       dp      all_gather, ...
    group of ranks 0 1  ─┼─ which differ on tp only            ──> tp      all_reduce, ...
    group of all ranks  ─┘  which differ on dp and tp              dp+tp   broadcast, ...

The counters are those of `backends.traffic`, which every `Collectives` has.
"""

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import OperationTraffic, Traffic
from lightning_shard.mesh import ParallelMesh
from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy

AxisTraffic = dict[str, dict[str, OperationTraffic]]
"""Counters by axis and operation."""


class AxisCounters:
    """Says what this rank has sent and waited since it was asked before.

    Args:
        strategy: The strategy of the run.
    """

    def __init__(self, strategy: DataParallelStrategy) -> None:
        self._strategy = strategy
        self._counters: list[tuple[str, Traffic]] = []  # by axis
        self._before: dict[int, dict[str, OperationTraffic]] = {}  # by id of the counters
        self.look()
        self.since()

    def look(self) -> None:
        """Find the groups that there are now, of two ranks and more."""
        mesh = self._strategy.mesh
        found = [(axis_of(mesh, ranks), traffic) for ranks, traffic in Collectives.counters()]
        self._counters = [(axis, traffic) for axis, traffic in found if axis]
        alive = {id(traffic) for _, traffic in self._counters}
        self._before = {key: before for key, before in self._before.items() if key in alive}

    def since(self) -> AxisTraffic:
        """Return the counters since the last call."""
        found = AxisTraffic()
        for axis, traffic in self._counters:
            before, now = self._before.get(id(traffic), {}), traffic.snapshot()
            self._before[id(traffic)] = now
            for operation, counters in now.items():
                more = _difference(counters, before.get(operation, OperationTraffic()))
                if more.calls or more.seconds:
                    add_to(found, {axis: {operation: more}})
        return self._without_mail(found)

    def _without_mail(self, found: AxisTraffic) -> AxisTraffic:
        """Leave out the time that threads of asynchronous SGD wait beside this rank's work."""
        if isinstance(self._strategy, AsyncSGDStrategy):
            for operations in found.values():
                if "recv" in operations:
                    operations["recv"].seconds = operations["recv"].seconds_waited = 0.0
        return found


def add_to(total: AxisTraffic, more: AxisTraffic) -> None:
    """Add counters to others."""
    for axis, operations in more.items():
        own = total.setdefault(axis, {})
        for operation, counters in operations.items():
            own[operation] = own.get(operation, OperationTraffic()) + counters


def waited(traffic: AxisTraffic) -> dict[str, float]:
    """Return the seconds of waiting for peers by axis."""
    return {
        axis: sum(one.seconds_waited for one in operations.values())
        for axis, operations in traffic.items()
    }


def seconds_in(traffic: AxisTraffic) -> float:
    """Return the seconds in which the rank could do nothing else, waiting included."""
    return sum(one.seconds for operations in traffic.values() for one in operations.values())


def axis_of(mesh: ParallelMesh, ranks: tuple[int, ...]) -> str:
    """Return the axes on which a group's ranks differ, such as "dp" or "pp+tp".

    Args:
        mesh: The grid of the run's ranks.
        ranks: Global ranks of the group.

    Returns:
        Empty for a single rank; "other" where the mesh has no such ranks.
    """
    if max(ranks, default=0) >= mesh.world_size:
        return "other"
    places = [mesh.coordinates(rank) for rank in ranks]
    return "+".join(axis for axis in mesh.axes if len({place[axis] for place in places}) > 1)


def _difference(now: OperationTraffic, before: OperationTraffic) -> OperationTraffic:
    """Return what has come since; all of it where the group was made anew meanwhile."""
    if now.calls < before.calls:
        return now
    return OperationTraffic(
        calls=now.calls - before.calls,
        elements=now.elements - before.elements,
        bytes=now.bytes - before.bytes,
        seconds=now.seconds - before.seconds,
        seconds_waited=now.seconds_waited - before.seconds_waited,
    )
