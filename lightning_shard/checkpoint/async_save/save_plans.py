"""Which rank writes what: planned by all ranks together, and anew once some rank's part is another.

    a rank's local plan     names, shapes, formats and places of what it has
    the global plan         of what several ranks have one writes it; rank 0 makes it, and an index

The local plans of most saves are those of an earlier one, and then so is the global one. A few are
kept: at the end of an epoch, where ranks keep no place in its data, they have less to write than
within it. A first optimizer step, parameters that are frozen or unfrozen, other ranks: some local
plan is a new one, and all ranks plan again. torch's own cache belongs to the process, where ranks
may be threads.
"""

from collections import deque
from copy import copy
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import CheckpointError

_MOST_KEPT = 3  # within an epoch, at its end, and one that somebody else has made necessary


class _Plan(NamedTuple):
    """What one rank keeps of a plan that all have made."""

    number: int
    local: SavePlan
    final: SavePlan
    metadata: Metadata | None


class SavePlans:
    """The plans of one rank's last saves, the latest of which is last."""

    def __init__(self) -> None:
        self.num_made = 0
        self._group: Collectives | None = None
        self._kept: deque[_Plan] = deque(maxlen=_MOST_KEPT)

    @property
    def final(self) -> SavePlan:
        """What this rank writes."""
        return self._kept[-1].final

    @property
    def metadata(self) -> Metadata:
        """The index of the folder, to be filled in; on rank 0."""
        metadata = self._kept[-1].metadata
        assert metadata is not None
        return copy(metadata)

    def numbers_of(self, local: SavePlan, group: Collectives | None) -> set[int]:
        """Return the numbers of the plans with this local plan; other ranks may have changed."""
        if group is not self._group:
            return set()
        return {one.number for one in self._kept if one.local == local}

    def choose(self, number: int) -> None:
        """Take up a plan that is kept; each rank must, with the same number."""
        place = [one.number for one in self._kept].index(number)
        chosen = self._kept[place]
        del self._kept[place]
        self._kept.append(chosen)

    def make(
        self,
        local: SavePlan,
        planner: SavePlanner,
        writer: StorageWriter,
        group: Collectives | None,
    ) -> None:
        """Plan with the other ranks, each of which must call."""
        if group is not self._group:
            self._kept.clear()
        locals_ = [local] if group is None else group.all_gather_object(local)
        made: tuple[list[SavePlan], str] = [], ""
        metadata = None
        if group is None or group.rank == 0:
            made, metadata = _global(locals_, planner, writer)
        if group is not None:
            made = group.broadcast_object(made, src=0)
        plans, failure = made
        if failure:
            raise CheckpointError(
                f"The checkpoint was not saved: the ranks' parts do not make up a whole: {failure}."
                f" Earlier checkpoints are as they were."
            )
        final = planner.finish_plan(plans[0 if group is None else group.rank])
        self.num_made, self._group = self.num_made + 1, group
        self._kept.append(_Plan(self.num_made, local, final, metadata))


def _global(
    locals_: list[SavePlan], planner: SavePlanner, writer: StorageWriter
) -> tuple[tuple[list[SavePlan], str], Metadata | None]:
    try:
        plans, metadata = planner.create_global_plan(locals_)
        made: Any = writer.prepare_global_plan(plans)
    except Exception as error:  # torch's, of plans that do not fit together
        return ([], repr(error)), None
    return (made, ""), metadata
