"""How a rank's part in a fit ends early: it leaves, all leave, or too few ranks are left.

    this rank is asked to leave    peers that stay take over its snapshot; it leaves the job
    all ranks are asked to leave   they save a checkpoint together, and end
    too few ranks for too long     those that are left save a checkpoint, and raise

Who asks: SIGTERM, or in process a `Fault` of kind "leave".
"""

import time

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard.backends import liveness
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.membership.generation import Generation
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.environments.launchers._lightning import mark_terminated
from lightning_shard.errors import RankFailedError

_SIGNALS_SECONDS = 1.0  # between the first and the last SIGTERM to the ranks of a job
_POLL_SECONDS = 0.01


class EarlyEnd:
    """Ends a fit on this rank.

    Args:
        fit: The fit that may end early.
        memory: What ranks that leave hand over.

    Attributes:
        is_certain: Whether whatever is raised from now on ends the fit on this rank.
        is_common: Whether all ranks end it at the same place, with their groups.
    """

    def __init__(self, fit: ElasticFit, memory: SnapshotMemory) -> None:
        self.is_certain = self.is_common = False
        self._fit = fit
        self._memory = memory

    def let_go(self) -> None:
        """Let those ranks go that were asked to; each rank must call.

        Raises:
            SIGTERMException: This rank has left, or all end here.
        """
        leaving = self._who_leaves()
        if not all(leaving):
            self._memory.hand_over(leaving)
        if not leaving[self._fit.strategy.collectives.rank]:
            return
        self.is_certain = True
        mark_terminated(self._fit.trainer)
        if all(leaving):  # the scheduler ends the job
            self.is_common = True
            self._save()
        else:
            self._memory.close()
            self._fit.strategy.drop_generation()
            self._fit.ranks.membership.leave()
        raise SIGTERMException(liveness.TERMINATED_STATUS)

    def save_and_end(self, generation: Generation) -> None:
        """Save what there is, and end, in the last generation; each rank must call.

        Raises:
            RankFailedError: Always: too few ranks are left.
        """
        self.is_certain = True
        path, step = self._save(), self._fit.trainer.global_step
        raise RankFailedError(
            f"Rank {generation.rank}: {generation.reason or 'too few ranks are left'}, and nobody "
            f"has come for a while. The state after step {step} is saved in {path}. Start "
            f"again with ckpt_path={str(path)!r} when there are more ranks."
        )

    def _who_leaves(self) -> list[bool]:
        """By rank; who ends a whole job sends its signals one after the other."""
        collectives, membership = self._fit.strategy.collectives, self._fit.ranks.membership
        leaving: list[bool] = collectives.all_gather_object(membership.is_leaving)
        if all(leaving):
            return leaving
        deadline = time.monotonic() + _SIGNALS_SECONDS
        while current_world() is None and not membership.is_leaving:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        leaving = collectives.all_gather_object(membership.is_leaving)
        return leaving

    def _save(self) -> str:
        path = _lightning.emergency_place(self._fit.trainer)
        self._fit.trainer.save_checkpoint(path)
        self._fit.strategy.finish_save()
        return path
