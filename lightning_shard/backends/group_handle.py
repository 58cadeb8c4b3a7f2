"""The part of a process group written in Python that c10d asks for besides collectives.

    torch.distributed ─► PythonGroup.allreduce(...) ─► GroupHandle._post ─► _start(Call) ─► Work
                         one method per c10d form       one Call per op       one per subclass

A subclass says how a `Call` is carried out.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_shard.backends import _c10d, liveness
from lightning_shard.backends.calls import Call, describe_tensor, op_name, tensor_key
from lightning_shard.core.call_site import CallSite, find_call_site
from lightning_shard.errors import ConfigError, RankFailedError


class GroupHandle(_c10d.ProcessGroupBase):
    """One rank's handle of one group; `global_ranks` are in order of their group rank."""

    backend_name: str
    shares_host: bool = False
    """Whether all its ranks are on one host, and may have buffers in common."""

    def __init__(
        self,
        name: str,
        global_ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta = timedelta.max,
    ) -> None:
        super().__init__(rank, len(global_ranks))
        self.timeout = timeout
        self.global_ranks = global_ranks
        self._name, self._group_rank = name, rank
        self._num_collectives = 0
        self._coalesced: list[dist.Work] | None = None

    @abstractmethod
    def _start(self, call: Call) -> dist.Work:
        """Begin this rank's part of an operation; return its handle."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        """Return itself: a handle holds no state that could be copied."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self._group_rank} of {self.group_desc})"

    def _post(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        *,
        agreed: tuple[object, ...] | None = None,
        reduce_op: Any = None,
        root: int = -1,
        tag: int | None = None,
        results: Sequence[Any] | None = None,
    ) -> dist.Work:
        """Begin an operation; every rank of the group must give the same `agreed`."""
        self._check_place(op, root, tag)
        kind = None if reduce_op is None else op_name(reduce_op)
        key = tensor_key(inputs) if agreed is None else agreed
        call = Call(
            op=op,
            rank=self._group_rank,
            inputs=inputs,
            outputs=outputs,
            agreed=(op, kind, root, key),
            site=find_call_site(),
            results=outputs if results is None else results,
            reduce_op=reduce_op,
            root=root,
            tag=tag,
        )
        self._num_collectives += tag is None
        work = self._start(call)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_place(self, op: str, root: int, tag: int | None) -> None:
        if not -1 <= root < self.size() or (tag is not None and tag < 0):
            raise ConfigError(
                f"Rank {self._group_rank} of {self.group_desc}: {op} got rank {root} of the group"
                f"{'' if tag is None else f' and tag {tag}'}, expected one of the group's "
                f"{self.size()} ranks{'' if tag is None else ' and a tag that is not negative'}."
            )

    def _check_sizes(self, op: str, small: Sequence[Tensor], large: Sequence[Tensor]) -> None:
        """Raise unless each large tensor holds one small one of each rank."""
        for one, all_of_them in zip(small, large, strict=True):
            if one.numel() * self.size() != all_of_them.numel() or one.dtype != all_of_them.dtype:
                raise ConfigError(
                    f"Rank {self._group_rank} of {self.group_desc}: {op} got "
                    f"{describe_tensor(one)} and {describe_tensor(all_of_them)}, expected the "
                    f"second to hold {self.size()} of the first, in the same dtype."
                )

    def _split_rows(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        if not sizes:
            if tensor.shape[0] % self.size():
                raise ConfigError(
                    f"Rank {self._group_rank} of {self.group_desc}: all_to_all_single got "
                    f"{tensor.shape[0]} rows, expected a multiple of {self.size()}, or split sizes."
                )
            sizes = [tensor.shape[0] // self.size()] * self.size()
        return list(torch.split(tensor.detach(), list(sizes)))

    # --- names --------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """Return the backend's name."""
        return self.backend_name

    _get_backend_name = getBackendName

    @property
    def group_name(self) -> Any:
        """Name of the group in c10d; torch keeps it in a backend, which a Python group lacks."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description of the group in c10d's logs: its name and ranks."""
        return describe_group(self._name, self.global_ranks)

    def getGroupName(self) -> str:  # noqa: N802 - what C++ calls
        """Return c10d's name of the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - what C++ calls
        """Return the description of the group in c10d's logs."""
        return self.group_desc

    # --- the rest of c10d's questions -----------------------------------------------------------

    def _get_backend(self, device: torch.device) -> _c10d.BackendStandIn:
        del device
        return _c10d.BackendStandIn()

    def _get_sequence_number_for_group(self) -> int:
        return self._num_collectives

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at 1."""

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> "CoalescedWork":
        del device
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a peer that has not come is an error."""
        self.timeout = timeout

    def shutdown(self) -> None:
        """Do nothing, unless a subclass holds something."""

    def abort(self) -> None:
        """End the group at once, as `shutdown` does."""
        self.shutdown()


class CallWork(dist.Work):
    """The handle of one call; a subclass says how to wait, and who has sent what it received."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    @abstractmethod
    def _source(self) -> int:
        """Return the group rank that sent what a receive got."""

    def synchronize(self) -> None:
        """Wait for the operation, as `wait`."""
        self.wait()

    block_current_stream = synchronize

    def exception(self) -> Exception | None:
        """Return None, unless a subclass keeps an error: they are raised by `wait`."""
        return None

    def result(self) -> list[Any]:
        """Wait, and return the tensors that were written."""
        self.wait()
        return list(self._call.results)

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a future that is done."""
        return done_future(self.result())

    def source_rank(self) -> int:
        """Wait, and return the group rank that sent what a receive got."""
        self.wait()
        return self._source()

    _source_rank = source_rank


class CoalescedWork(dist.Work):
    """Several operations as one handle."""

    def __init__(self, works: Sequence[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each operation."""
        for work in self._works:
            work.wait(*(() if timeout is None else (timeout,)))
        return True

    def is_completed(self) -> bool:
        """Whether all operations are done."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Any]:
        """Wait, and return the tensors that each operation wrote."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a future that is done."""
        self.wait()
        return done_future(self.result())


def done_future(results: list[Any]) -> torch.futures.Future[Any]:
    """Return a future that has these results, of which the tensors are on one device."""
    devices: list[Any] = [one.device for one in results if isinstance(one, Tensor) and one.is_cuda]
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices[:1] or None)
    future.set_result(results)
    return future


def ranks_of(options: Any) -> tuple[int, ...]:
    """Return a group's global ranks from c10d's `_DistributedBackendOptions`."""
    return tuple(options.global_ranks_in_group) or tuple(range(options.group_size))


def describe_group(name: str, global_ranks: Sequence[int]) -> str:
    """Return a group's name and ranks in words."""
    return f"group {name!r} (ranks {', '.join(map(str, global_ranks))})"


class InFlight(ABC):
    """One operation in flight; a backend says how it goes on."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.done = False
        self.error: Exception | None = None
        self._lock = lock
        self._on_end: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def source(self) -> int:
        """The group rank that sent what a receive got; -1 before it came."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the flight has ended, or now if it has."""
        with self._lock:
            self._on_end.append(callback)
        if self.done:
            self.call_back()

    @property
    def is_followed(self) -> bool:
        """Whether a callback waits for the end of the flight."""
        return bool(self._on_end)

    def call_back(self) -> None:
        """Call the callbacks, which are the user's code, outside the lock and inference mode."""
        with self._lock:
            callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()


class FlightWork(CallWork):
    """One rank's handle of an operation in flight."""

    def __init__(self, flight: InFlight, call: Call) -> None:
        super().__init__(call)
        self._flight = flight

    @abstractmethod
    def _wait_until(self, end: float | None) -> bool:
        """Return whether the flight has ended, at this time of `time.monotonic` at the latest."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there; after a `timeout` of its own the operation goes on."""
        end = time.monotonic() + timeout.total_seconds() if timeout else None
        if not self._wait_until(end):
            raise TimeoutError(f"{self._call} at {self._call.site} took longer than {timeout}.")
        if self._flight.error is not None:
            raise self._flight.error
        return True

    def is_success(self) -> bool:
        """Whether the results are there."""
        return self.is_completed() and self._flight.error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that has failed, else None."""
        return self._flight.error

    def _source(self) -> int:
        return self._flight.source

    def get_future(self) -> Future[Any]:
        """Return a future that ends with the operation, on whatever thread sees it end."""
        devices: list[Any] = [
            t.device for t in self._call.outputs or self._call.inputs if t.is_cuda
        ]
        future: Future[Any] = Future(devices=devices[:1] or None)

        def end() -> None:
            if self._flight.error is None:
                future.set_result(list(self._call.results))
            else:
                future.set_exception(self._flight.error)

        self._flight.on_end(end)
        return future


class OperationWatch:
    """Watches one operation of this rank for its flight; a backend says when it can never end."""

    def __init__(self, group: GroupHandle, operation: Call | str, site: CallSite) -> None:
        self._group, self._operation, self._site = group, operation, site

    def __str__(self) -> str:
        return f"{self._operation} of {self._group.group_desc} at {self._site}"

    @property
    def place(self) -> str:
        """This rank in words."""
        return f"Rank {self._group.global_ranks[self._group.rank()]}"

    def peer_failure(self) -> RankFailedError | None:
        """Return the error of a rank that is known to have failed."""
        lifeline = liveness.current()
        try:
            if lifeline is not None and lifeline.has_verdict:  # before a call is put in words
                lifeline.check(str(self._operation))
        except RankFailedError as error:
            return error
        return None
