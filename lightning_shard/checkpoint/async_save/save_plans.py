"""Which rank writes what: planned by all ranks together, and anew once some rank's part is another.

    a rank's local plan     names, shapes, formats and places of what it has
    the global plan         of what several ranks have one writes it; rank 0 makes it, and an index

The local plans of most saves are those of the save before, and then so is the global one. A first
optimizer step, parameters that are frozen or unfrozen, the end of an epoch, where no place in its
data is kept, other ranks: some local plan differs, and all ranks plan again. torch's own cache
belongs to the process, where ranks may be threads.
"""

from copy import copy
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import CheckpointError


class SavePlans:
    """The plans of one rank's last save.

    Attributes:
        final: What this rank writes.
        num_made: How often the ranks have planned together.
    """

    final: SavePlan

    def __init__(self) -> None:
        self.num_made = 0
        self._group: Collectives | None = None
        self._local: SavePlan | None = None
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """The index of the folder, to be filled in; on rank 0."""
        assert self._metadata is not None
        return copy(self._metadata)

    def stand(self, local: SavePlan, group: Collectives | None) -> bool:
        """Whether this rank's local plan is that of its last save, among the same ranks."""
        return group is self._group and local == self._local

    def make(
        self,
        local: SavePlan,
        planner: SavePlanner,
        writer: StorageWriter,
        group: Collectives | None,
    ) -> None:
        """Plan with the other ranks, each of which must call.

        Args:
            local: This rank's local plan.
            planner: The planner that has made it.
            writer: The writer of the folder.
            group: Group of all ranks; None where this process is alone.

        Raises:
            CheckpointError: The ranks' plans do not fit together.
        """
        self._local = None
        locals_ = [local] if group is None else group.all_gather_object(local)
        made: tuple[list[SavePlan], str] = [], ""
        if group is None or group.rank == 0:
            made = self._global(locals_, planner, writer)
        if group is not None:
            made = group.broadcast_object(made, src=0)
        plans, failure = made
        if failure:
            raise CheckpointError(
                f"The checkpoint was not saved: the ranks' parts do not make up a whole: {failure}."
                f" Earlier checkpoints are as they were."
            )
        self.final = planner.finish_plan(plans[0 if group is None else group.rank])
        self._local, self._group = local, group
        self.num_made += 1

    def _global(
        self, locals_: list[SavePlan], planner: SavePlanner, writer: StorageWriter
    ) -> tuple[list[SavePlan], str]:
        try:
            plans, self._metadata = planner.create_global_plan(locals_)
            made: Any = writer.prepare_global_plan(plans)
        except Exception as error:  # torch's, of plans that do not fit together
            return [], repr(error)
        return made, ""
