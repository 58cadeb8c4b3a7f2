"""torch's writer of folders in two halves: what all ranks agree on now, and the disk later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_shard.checkpoint.async_save.staged_items import StagedItems
from lightning_shard.checkpoint.sharded.box_writer import BoxWriter

Staging: TypeAlias = Callable[[SavePlan, SavePlanner], StagedItems | None]
"""Copies what a rank writes by a plan; None where an earlier copy does not hold the same."""


class StagedWriter(BoxWriter):
    """Copies what `save` of torch.distributed.checkpoint would write, and writes it when asked.

    Args:
        folder: The folder to write into.
        staging: Copies what this rank writes.

    Attributes:
        staged: What this rank has copied, once `save` has been called.
    """

    def __init__(self, folder: Path, staging: Staging) -> None:
        super().__init__(folder)
        self.staged: StagedItems | None = None
        self._staging = staging
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._plan = plan
        self.staged = self._staging(plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._metadata = metadata

    def write_staged(self) -> list[WriteResult]:
        """Write this rank's file, and return where in it everything is."""
        assert self._plan is not None
        staged: Any = self.staged  # of a planner it has the one method that is asked for
        results: list[WriteResult] = super().write_data(self._plan, staged).value()
        return results

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """Write the index, on rank 0, from the results of all ranks."""
        assert self._metadata is not None
        super().finish(self._metadata, results)
