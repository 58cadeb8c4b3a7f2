"""torch's writer of folders in two halves: the copy now, and the disk later."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from lightning_shard.checkpoint.async_save.staged_items import StagedItems
from lightning_shard.checkpoint.files.open_folder import OpenFolder
from lightning_shard.checkpoint.sharded.box_writer import BoxWriter

Staging: TypeAlias = Callable[[SavePlan, SavePlanner], StagedItems | None]
"""Copies what a rank writes by a plan; None where an earlier copy does not hold the same."""


class StagedWriter(BoxWriter):
    """Copies what this rank writes by a plan, and writes it when asked.

    Args:
        folder: The folder to write into.
        rank: Number of this rank.
    """

    def __init__(self, folder: OpenFolder, rank: int) -> None:
        super().__init__(folder)
        self.set_up_storage_writer(rank == 0, rank=rank)
        self.staged: StagedItems | None = None
        self._plan: SavePlan | None = None

    def copy(self, plan: SavePlan, planner: SavePlanner, staging: Staging) -> bool:
        """Copy what this rank writes; return False where an earlier copy does not hold the same."""
        self._plan, self.staged = plan, staging(plan, planner)
        return self.staged is not None

    def write_staged(self) -> list[WriteResult]:
        """Write this rank's file, and return where in it everything is."""
        assert self._plan is not None
        staged: Any = self.staged  # of a planner it has the one method that is asked for
        results: list[WriteResult] = self.write_data(self._plan, staged).value()
        return results
