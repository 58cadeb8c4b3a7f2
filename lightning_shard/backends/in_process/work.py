"""The handle of an operation; waiting for it lets the other ranks run."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.futures import Future

from lightning_shard.backends.calls import Call
from lightning_shard.backends.group_handle import CallWork
from lightning_shard.backends.in_process.channel import Meeting
from lightning_shard.backends.streams import join_streams

if TYPE_CHECKING:
    from lightning_shard.backends.in_process.world import World


class InProcessWork(CallWork):
    """One rank's handle of one operation in an in-process world."""

    def __init__(self, world: "World", meeting: Meeting, call: Call):
        super().__init__(call)
        self._world, self._meeting = world, meeting

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the other ranks run until the results are there.

        Args:
            timeout: Ignored, since a wait that can never end is found at once.

        Raises:
            DeadlockError, CollectiveMismatchError, RankFailedError: The results can never be there.
        """
        del timeout
        if not self._meeting.done:
            self._world.wait_for(self._meeting, self._call)
        join_streams(self._meeting.finished)
        return True

    def is_completed(self) -> bool:
        """Whether the results are there; if not, the other ranks run once before the answer."""
        if not self._meeting.done:
            self._world.poll(self._meeting, self._call)
        return self._meeting.done

    def is_success(self) -> bool:
        """Whether the results are there; no other rank runs meanwhile."""
        return self._meeting.done

    def exception(self) -> None:
        """Return None: errors are raised by `wait`."""

    def _source(self) -> int:
        return self._meeting.source

    def get_future(self) -> Future[Any]:
        """Wait, and return a future that is done; torch's DDP blocks its thread on futures."""
        self.wait()
        tensors = [t for t in self._call.results if isinstance(t, Tensor) and t.is_cuda]
        future: Future[Any] = Future(devices=[tensors[0].device] if tensors else None)
        future.set_result(list(self._call.results))
        return future
