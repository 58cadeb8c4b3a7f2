"""A process group that hands each operation to another group, once its ranks agree on it."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends.calls import Call, tensor_key
from lightning_shard.backends.debug_wrapper.bulletin import Bulletin
from lightning_shard.backends.debug_wrapper.fingerprint import Fingerprint, find_misfit
from lightning_shard.backends.debug_wrapper.messages import ComparedMessages
from lightning_shard.backends.debug_wrapper.torch_groups import (
    carriers,
    debug_name,
    make_gloo,
    make_nccl,
)
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.group_handle import CoalescedWork, GroupHandle, describe_group
from lightning_shard.backends.liveness.interruption import interrupt_backend
from lightning_shard.backends.mismatch import Side, describe_disagreement
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.python_group import ANY_SOURCE, PythonGroup, Tensors, as_list
from lightning_shard.backends.rank_order import C10D_OPS, ReduceOpName
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG

MakeGroup = Callable[[Any, Any], dist.ProcessGroup]
"""Makes a rank's handle of a group from c10d's `_DistributedBackendOptions` and its own options."""


class Comparer(PythonGroup):
    """A group whose operations move nothing: each returns once every rank has called the same.

    Args:
        name: Name of the group in c10d.
        bulletin: Board of the group, on which the ranks post their calls.
    """

    backend_name: ClassVar[str] = "comparer"

    def __init__(self, name: str, bulletin: Bulletin) -> None:
        super().__init__(name, bulletin.global_ranks, bulletin.rank)
        self._bulletin = bulletin
        self._number = 0
        self._turn = threading.RLock()
        self._in_turn = ""
        self._overlap = ""
        self._sites_seen: set[tuple[str, ...]] = set()

    def compare(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        reduce_op: Any = None,
    ) -> None:
        """Return once every rank has called this operation, with tensors of these shapes and types.

        Raises:
            CollectiveMismatchError: A rank has called another operation.
            RankFailedError: A rank has failed, or has not come in time.
        """
        key = (tensor_key(inputs), tensor_key(outputs))
        with self.turn():
            self._post(op, inputs, outputs, agreed=key, reduce_op=reduce_op)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time compare and start its operation, in the order of its numbers."""
        name = threading.current_thread().name
        if not self._turn.acquire(blocking=False):
            self._overlap = (
                f"Threads {self._in_turn!r} and {name!r} of rank {self._bulletin.global_rank} "
                "called at the same time: their order is not the same on every rank. Call from "
                "one thread, or give each a group of its own."
            )
            self._turn.acquire()
        try:
            self._in_turn = name
            yield
        finally:
            self._turn.release()

    @override
    def _start(self, call: Call) -> Work:
        board, mine = self._bulletin, Fingerprint.of(call, self.size())
        board.raise_known_problem(f"{mine.operation} at {mine.site}")
        self._number += 1
        board.post(self._key(self._number, board.rank), mine)
        keys = [self._key(self._number, rank) for rank in range(self.size())]
        place = f"{mine.operation} at {mine.site}"
        board.wait_until(lambda: board.holds(*keys), place, lambda: self._describe_late(mine))
        calls = board.read(keys)
        # Who has posted this number has read all of the last one, so nobody reads the one before.
        board.remove(self._key(self._number - 2, board.rank))
        self._compare(calls)
        return CoalescedWork([])

    def _compare(self, calls: list[Fingerprint]) -> None:
        misfit = find_misfit(calls)
        if misfit is None:
            self._compare_sites(calls)
            return
        got, expected = (self._side(rank, calls[rank]) for rank in misfit[:2])
        board = self._bulletin
        problem = describe_disagreement(
            board.group, self._number, got=got, expected=expected, what=misfit[2]
        )
        board.announce("\n".join(filter(None, (problem, self._overlap))))
        mine = calls[board.rank]
        board.raise_problem(f"{mine.operation} of {board.group} at {mine.site}")

    def _compare_sites(self, calls: list[Fingerprint]) -> None:
        """Warn once of each set of differing call sites: a branch by rank is often a mistake."""
        sites = tuple(call.site for call in calls)
        if self._bulletin.rank or len(set(sites)) == 1 or sites in self._sites_seen:
            return
        self._sites_seen.add(sites)
        places = "".join(
            f"\n  rank {rank}: {site}" for rank, site in zip(self.global_ranks, sites, strict=True)
        )
        warnings.warn(
            f"Ranks of {self._bulletin.group} called its operation number {self._number}, "
            f"{calls[0].operation}, from different places:{places}\nThey agree in all that can be "
            "compared, so it goes on; look whether they mean the same data.",
            stacklevel=2,
        )

    def _describe_late(self, mine: Fingerprint) -> str:
        board = self._bulletin
        lines = [
            f"  rank {board.global_ranks[rank]}: {self._describe_last(rank)}"
            for rank in range(self.size())
            if not board.holds(self._key(self._number, rank))
        ]
        report = "\n".join(filter(None, (*lines, self._overlap)))
        return (
            f"Rank {board.global_rank} has waited {board.timeout} in {mine.operation}, number "
            f"{self._number} of {board.group} at {mine.site}. These ranks have not come to it:\n"
            f"{report}\nLook for a rank that returned early, took another branch, or waits in "
            "another group; raise the timeout where a rank may compute for so long."
        )

    def _describe_last(self, rank: int) -> str:
        last = self._key(self._number - 1, rank)
        if not self._bulletin.holds(last):
            return "has not called anything in this group"
        call = self._bulletin.read([last])[0]
        return f"its last one was {call.operation} at {call.site}"

    def _side(self, rank: int, call: Fingerprint) -> Side:
        return Side(rank=self.global_ranks[rank], operation=call.operation, site=call.site)

    def _key(self, number: int, rank: int) -> str:
        return f"call/{number}/{rank}"


def _compared(name: str) -> Callable[..., Work]:
    """Make the method with this c10d name, which compares the call and then hands it over."""

    def method(self: "DebugGroup", *args: Any, **kwargs: Any) -> Work:
        with self.comparer.turn():
            getattr(self.comparer, name)(*args, **kwargs)
            work: Work = getattr(self._inner, name)(*args, **kwargs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    method.__name__ = name
    method.__doc__ = f"Compare {name} with the other ranks', then do it."
    return method


class DebugGroup(GroupHandle):
    """One rank's handle of a group whose ranks compare their calls before they are carried out.

    Args:
        options: c10d's `_DistributedBackendOptions` of the group.
        inner: The group that carries the calls out.
        name: Name of the debug wrapper in c10d, `checked_<backend>`.
        devices: Device types whose tensors the group takes.

    Attributes:
        comparer: Compares a call without carrying it out.
    """

    backend_name: ClassVar[str] = "checked"

    def __init__(
        self, options: Any, inner: dist.ProcessGroup, name: str, devices: Sequence[str]
    ) -> None:
        ranks = tuple(options.global_ranks_in_group)
        self._is_default = not ranks
        ranks = ranks or tuple(range(options.group_size))
        super().__init__(options.group_id, ranks, options.group_rank)
        self._inner, self._backend, self._devices = inner, name, devices
        self.shares_host = getattr(inner, "shares_host", False)
        self._bulletin = Bulletin(
            options.store,
            ranks,
            options.group_rank,
            options.timeout,
            describe_group(options.group_id, ranks),
        )
        self.comparer = Comparer(options.group_id, self._bulletin)
        self._messages = ComparedMessages(self._bulletin, self._bulletin.reconnected(), inner)

    allreduce = _compared("allreduce")
    allreduce_coalesced = _compared("allreduce_coalesced")
    reduce = _compared("reduce")
    reduce_scatter = _compared("reduce_scatter")
    reduce_scatter_single = _compared("reduce_scatter_single")
    reduce_scatter_single_coalesced = _compared("reduce_scatter_single_coalesced")
    _reduce_scatter_base = _compared("_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = _compared("reduce_scatter_tensor_coalesced")
    broadcast = _compared("broadcast")
    allgather = _compared("allgather")
    allgather_coalesced = _compared("allgather_coalesced")
    all_gather_single = _compared("all_gather_single")
    all_gather_single_coalesced = _compared("all_gather_single_coalesced")
    _allgather_base = _compared("_allgather_base")
    allgather_into_tensor_coalesced = _compared("allgather_into_tensor_coalesced")
    gather = _compared("gather")
    scatter = _compared("scatter")
    alltoall = _compared("alltoall")
    all_to_all_single = _compared("all_to_all_single")
    alltoall_base = _compared("alltoall_base")
    gather_common = _compared("gather_common")
    barrier = _compared("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come; comparing does just that, and names who has not."""
        with self.comparer.turn():
            self.comparer.monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        """Send to a rank of the group, and compare the send with its receive."""
        if tag >= FIRST_RESERVED_TAG:  # part of a collective that has been compared
            return self._inner.send(as_list(tensors), dst_rank, tag)
        return self._post("send", as_list(tensors), root=dst_rank, tag=tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        """Receive from a rank of the group, once the receive has been compared with the send."""
        if tag >= FIRST_RESERVED_TAG:
            return self._inner.recv(as_list(tensors), src_rank, tag)
        return self._post("recv", [], as_list(tensors), root=src_rank, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive from whichever rank sends first."""
        return self.recv(tensors, ANY_SOURCE, tag)

    @override
    def _start(self, call: Call) -> Work:
        return self._messages.send(call) if call.op == "send" else self._messages.receive(call)

    # --- the rest of c10d's questions -----------------------------------------------------------

    @override
    def getBackendName(self) -> str:
        return self._backend

    @override
    def _get_backend_name(self) -> str:
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._devices]

    @override
    def _get_sequence_number_for_group(self) -> int:
        return self.comparer._get_sequence_number_for_group()

    def interrupt(self) -> None:
        """Have every waiting operation raise; may be called from any thread."""
        for carrier in carriers(self._inner):
            interrupt_backend(carrier)

    @override
    def shutdown(self) -> None:
        if self._is_default:
            self._bulletin.meet_briefly("left")
        self._inner.shutdown()

    @override
    def abort(self) -> None:
        self._inner.abort()


def register_debug(backend: str, make_inner: MakeGroup, devices: Sequence[str]) -> None:
    """Register the debug wrapper of a backend in c10d, under `debug_name(backend)`.

    Args:
        backend: Name of the wrapped backend.
        make_inner: Makes the groups that carry the operations out.
        devices: Device types whose tensors the backend moves.
    """
    name = debug_name(backend)

    def make_group(options: Any, backend_options: Any) -> DebugGroup:
        return DebugGroup(options, make_inner(options, backend_options), name, devices)

    _c10d.register_backend(name, make_group, devices)


if dist.is_available():
    register_debug("gloo", make_gloo, ["cpu"])
    register_debug("nccl", make_nccl, ["cuda"])


_OPS: dict[str, Any] = {**C10D_OPS, "avg": ReduceOp.AVG}


def exchange_collectives(group: dist.ProcessGroup) -> ExchangeCollectives:
    """Wrap a group in exchange collectives, for a `DebugGroup` in those that compare.

    Collectives.reduce_scatter ─► compared ─► messages with reserved tags, which pass unchecked
    """
    return (DebugExchange if isinstance(group, DebugGroup) else ExchangeCollectives)(group)


class DebugExchange(ExchangeCollectives):
    """Exchange collectives whose ranks first compare what they call; for a `DebugGroup` alone."""

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        self._compare("all_reduce", [source], reduce_op=_OPS[op])
        return super()._all_reduce(output, source, op)

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        self._compare("reduce_scatter", [source], [output], reduce_op=_OPS[op])
        return super()._reduce_scatter(output, source, op)

    def _all_gather(self, output: Tensor, source: Tensor) -> StartedTransfer:
        self._compare("all_gather", [source])
        return super()._all_gather(output, source)

    def _compare(self, operation: str, *tensors: list[Tensor], reduce_op: Any = None) -> None:
        assert isinstance(self.group, DebugGroup)
        self.group.comparer.compare(operation, *tensors, reduce_op=reduce_op)
