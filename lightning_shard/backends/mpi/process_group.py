"""The process group of one rank over MPI: communicators, message lanes, time-outs."""

import time
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, ClassVar

import torch
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends.calls import Call
from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.mpi.flight import Flight, progress
from lightning_shard.backends.mpi.operations import OPERATIONS, Steps
from lightning_shard.backends.mpi.staging import must_stage, staged
from lightning_shard.backends.mpi.work import MPIWork
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.errors import CollectiveMismatchError, ConfigError, RankFailedError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BACKEND_NAME = "mpi4py"  # c10d keeps the name "mpi" for its own, even where torch lacks it


class MPIGroup(PythonGroup):
    """One rank's handle of one group.

    Args:
        name: c10d's name of the group, the same on each of its ranks.
        global_ranks: The group's ranks in COMM_WORLD, in the group's own order.
        rank: This rank's number in the group.
        timeout: After which a peer that has not come is an error.

    Attributes:
        comm: For collectives and the user's messages.
        inner: For messages of which the user does not know.
    """

    backend_name: ClassVar[str] = BACKEND_NAME

    def __init__(
        self, name: str, global_ranks: tuple[int, ...], rank: int, timeout: timedelta
    ) -> None:
        super().__init__(name, global_ranks, rank)
        self._timeout = timeout
        self._numbers = count()
        self._largest_tag = runtime.largest_tag()
        tag = sum(name.encode()) % self._largest_tag  # tells groups apart that are made at once
        self.comm: Intracomm = runtime.communicator(global_ranks, tag)
        self.inner: Intracomm = runtime.communicator(global_ranks, tag)

    def next_number(self) -> int:
        """Return a tag for the inner messages of one more collective, the same on every rank."""
        return (2 * next(self._numbers)) % (self._largest_tag - 1)

    def lane(self, tag: int) -> "tuple[Intracomm, int]":
        """Return the communicator and MPI's tag for messages under c10d's tag.

        Raises:
            ConfigError: This MPI library has no tag so large.
        """
        if tag >= FIRST_RESERVED_TAG:  # odd ones, beside the even ones of `next_number`
            return self.inner, (2 * tag + 1) % (self._largest_tag - 1)
        if tag > self._largest_tag:
            raise ConfigError(
                f"Rank {self.rank()} of {self.group_desc}: got the tag {tag}, expected one up to "
                f"{self._largest_tag}, the largest of this MPI library."
            )
        return self.comm, tag

    @override
    def _start(self, call: Call) -> MPIWork:
        watch = _CallWatch(self, call, time.monotonic() + self._timeout.total_seconds())
        if (error := watch.peer_failure()) is not None:
            raise error
        flight = Flight(self._steps(call), watch)
        if not flight.poll():
            progress.add(flight)
        return MPIWork(flight, call)

    def _steps(self, call: Call) -> Steps:
        tensors = call.inputs or call.outputs
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()
        operation = OPERATIONS[call.op]
        return staged(operation, self, call) if must_stage(tensors) else operation(self, call)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a peer that has not come is an error."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Give the communicators back; the group is not used afterwards."""
        for comm in (self.comm, self.inner):
            runtime.free(comm)


class _CallWatch:
    """Knows when one call can never end.

    Args:
        group: The group.
        call: What this rank asked of it.
        end: When the time-out is over, on the monotonic clock.
    """

    def __init__(self, group: MPIGroup, call: Call, end: float) -> None:
        self._group, self._call, self._end = group, call, end

    def __str__(self) -> str:
        return f"{self._call} of {self._group.group_desc} at {self._call.site}"

    def peer_failure(self) -> RankFailedError | None:
        """Return the error of a rank that is known to have failed."""
        lifeline = liveness.current()
        try:
            if lifeline is not None:
                lifeline.check(self._call.op)
        except RankFailedError as error:
            return error
        return None

    def why_it_stops(self) -> Exception | None:
        """Return why the operation can never end, if so: a failed rank, or the time-out."""
        if (failure := self.peer_failure()) is not None or time.monotonic() < self._end:
            return failure
        if (lifeline := liveness.current()) is not None:
            return lifeline.explain(str(self))
        return RankFailedError(
            f"Rank {self._group.rank()} has waited for the group's time-out in {self}, and not "
            "every rank has come. Look for the first error among the other ranks' output."
        )

    def explain(self, error: Exception) -> Exception:
        """Return our error for one of MPI's; other errors stay as they are."""
        module = runtime.mpi()
        if not isinstance(error, module.Exception):
            return error
        if error.Get_error_class() == module.ERR_TRUNCATE:
            made: Exception = CollectiveMismatchError(
                f"Rank {self._group.rank()}: a peer gave more elements to {self} than expected "
                "here. Every rank must make the same calls with the same shapes; debug=True finds "
                "the first that differs."
            )
        else:
            made = self.peer_failure() or RankFailedError(
                f"Rank {self._group.rank()} lost a peer in {self}. MPI said: {error}"
            )
        made.__cause__ = error
        return made
