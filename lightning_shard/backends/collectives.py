"""The typed facade over one process group: what every engine of this package calls.

    engine ──> Collectives ──────────> c10d (nccl, in_process), sum / ranks
                   ├─ ShmCollectives ──> memory of all ranks, which is averaged there
                   └─ ExchangeCollectives ──> c10d's point-to-point messages (gloo, mpi), rank_order

Public methods check the tensors, count the traffic and hand over to a protected method of the same
name. These begin c10d's own algorithms, which suit NCCL and the groups of this package; a subclass
overrides those that its backend does badly. All ranks and peers are ranks *within the group*.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import ClassVar, Protocol, Self, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends._c10d import all_gather_flat, reduce_scatter_flat
from lightning_shard.backends.objects import broadcast_object, gather_objects
from lightning_shard.backends.pending import OperationContext, Pending, Span, StartedTransfer
from lightning_shard.backends.rank_order import (
    C10D_OPS,
    ReduceOpName,
    check_op,
    combine_in_rank_order,
    is_narrow,
)
from lightning_shard.backends.shapes import (
    check_contiguous,
    check_flat,
    check_full_and_local,
    check_message,
    check_peer,
    check_result,
    check_same_dtype,
    check_slices,
    check_sum_dtype,
    checked_splits,
)
from lightning_shard.backends.traffic import GroupTraffic, Traffic, ring_share
from lightning_shard.errors import ConfigError


class CommonBuffer(Protocol):
    """A flat buffer that the ranks of a host have in common, of which each owns a part.

                   between updates                  inside an update
        read       the one copy, with own edits     the same
        write      an edit of this rank's alone     its own part is written for all
        gather     edits of the own part are given to all, and other edits are dropped

    An update that writes `part` alone needs no `open`, which maps pages anew, twice a step.
    """

    group: dist.ProcessGroup

    @property
    def tensor(self) -> Tensor:
        """The buffer as this rank sees and edits it, shape (F,)."""

    @property
    def part(self) -> Tensor:
        """This rank's part, shape (S,), at addresses whose writes go to all; see `give_edits`."""

    def meet(self) -> None:
        """Return once no rank of the group reads or writes; each must call."""

    def open(self) -> None:
        """Let this rank's writes of its own part go to all, until the next gather; after `meet`."""

    def give_edits(self) -> None:
        """Let `part` have this rank's edits of its own, before an update of it; after `meet`."""

    def gather(self) -> Pending:
        """Begin to bring all ranks' parts together; each rank must call."""

    def leave(self) -> Tensor:
        """Let go of `tensor`, which keeps its content; return the one that takes its place."""


def begin_update(buffers: Iterable[CommonBuffer], *, in_place: bool) -> None:
    """Before an optimizer writes its parts of some buffers; each rank must call.

    Args:
        buffers: The same on all ranks of each group.
        in_place: Whether it writes to `tensor`, which parameters show, and not to `part`.
    """
    buffers = list(buffers)
    for buffer in {id(one.group): one for one in buffers}.values():
        buffer.meet()
    for buffer in buffers:
        if in_place:
            buffer.open()
        else:
            buffer.give_edits()


T = TypeVar("T")


class Collectives:
    """Collective operations of one process group, synchronous or asynchronous, counted.

    Every method but `send` and `recv` is collective: each rank of the group must call it, in the
    same order. With `async_op=True` the operation goes on in the background until the returned
    handle's `wait`; several may be in flight and may be waited for in any order.

    Attributes:
        group: The process group whose ranks take part.
        rank: This rank's number in the group.
        size: Number of ranks in the group.
        traffic: Calls, bytes and seconds of each operation of this rank through this object.
    """

    _alive: ClassVar["WeakValueDictionary[int, Collectives]"] = WeakValueDictionary()
    _numbers_made: ClassVar[Iterator[int]] = count()

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"Expected a process group that this rank belongs to, got {group!r}. "
                "dist.new_group returns no group to ranks outside it: make Collectives on members."
            )
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.traffic = Traffic()
        self._alive[next(self._numbers_made)] = self

    def duplicate(self, timeout: timedelta | None = None) -> Self:
        """Make a second group of the same ranks, whose operations keep an order of their own.

        Each rank of the group must call.

        Args:
            timeout: Time-out of the new group; c10d's default when left out.

        Returns:
            The collectives of the new group, which count into the same `traffic`.
        """
        duplicate = self.beside(dist.get_process_group_ranks(self.group), timeout)
        duplicate.traffic = self.traffic
        return duplicate

    def beside(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Self:
        """Make a group of ranks of the world over the same backend; they must call, no others."""
        own = dist.get_backend(self.group)
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=None if own == dist.get_backend() else own,  # None is all of the default's
            use_local_synchronization=True,
        )
        return type(self)(group)

    def new_empty(
        self,
        like: Tensor,
        numel: int,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return memory for a flat buffer that this group moves often, with any content.

        Engines ask here for parameters and gradients: on shared memory peers read them in place.
        Any other tensor may be given to the operations as well.

        Args:
            like: Tensor whose kind the new one has, and its format and device unless given.
            numel: Number of elements.
            dtype: Format of its elements.
            device: Device on which it lies.

        Returns:
            Shape (numel,).
        """
        return like.new_empty(numel, dtype=dtype, device=device)

    def set_aside(self, flat: Tensor, let_go: Callable[[], None]) -> bool:
        """Keep a buffer of `new_empty`, which its owner does not use now, until memory is needed.

        Args:
            flat: The buffer, all of it.
            let_go: A method that drops the owner's references to it, if others need its memory; it
                is called no more once its object is gone.

        Returns:
            Whether it is kept; otherwise it takes memory for as long as there are references.
        """
        return False

    def take_up(self, flat: Tensor) -> None:
        """Use a buffer again that was set aside."""

    def share(self, values: Tensor, start: int, stop: int) -> CommonBuffer | None:
        """Return a buffer that exists once for all ranks of the group; each rank must call.

        Args:
            values: Shape (F,), the first content, of which this rank's part is taken.
            start: First element of the part that this rank will update.
            stop: End of that part.

        Returns:
            None where the ranks have no memory in common.

        Raises:
            BackendUnavailableError: The host has no memory for it.
        """
        return None

    def dtype_on_the_wire(self, dtype: torch.dtype, into: torch.dtype | None) -> torch.dtype:
        """Return the format in which an average of values of `dtype` travels.

        Args:
            dtype: Dtype of the values.
            into: Dtype of the output of a reduce-scatter; None for an all-reduce.
        """
        values = torch.empty(0, dtype=dtype)
        if into is None:
            return self._all_reduce_dtype(values, "avg")
        return self._reduce_scatter_dtype(torch.empty(0, dtype=into), values, "avg")

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOpName = "sum",
        *,
        output: Tensor | None = None,
        async_op: bool = False,
    ) -> Pending:
        """Reduce `tensor` over the ranks to the same values everywhere.

        Args:
            tensor: Any shape, contiguous; shape and dtype are the same on each rank.
            op: "sum", "avg", "max" or "min"; "avg" is a sum and one division, and sums narrow
                types in float32.
            output: Tensor for the result, of the shape and dtype of `tensor`; None: in place.
            async_op: Whether to return before the operation is done.

        Raises:
            LayoutError: The tensor is not contiguous, shapes or types differ, or integers would be
                averaged.
            RankFailedError: A peer has died.
        """
        check_op(op, tensor.dtype)
        check_contiguous("all_reduce", self.rank, tensor)
        sent = (
            ring_share(2 * tensor.numel(), self.size),
            self._all_reduce_dtype(tensor, op).itemsize,
        )
        source = target = tensor.detach().view(-1)
        if output is not None:
            check_result("all_reduce", self.rank, output, tensor)
            target = output.detach().view(-1)
        begin = partial(self._all_reduce, target, source, op)
        return self.start("all_reduce", begin, async_op, *sent)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - c10d's name
        op: ReduceOpName = "sum",
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Pending:
        """Reduce `input` over the ranks and keep this rank's slice.

        Args:
            output: Shape (S,). May be input[rank * S : (rank + 1) * S] itself. May be float32
                where the input is narrower: the sum is then never rounded to the input's type.
            input: Shape (W * S,); it may be overwritten only when it holds the output.
            op: "sum", "avg", "max" or "min"; "avg" is a sum and one division, and sums narrow
                types in float32.
            sizes: Number of elements of each rank's slice; None: S for each.
            async_op: Whether to return before the operation is done.

        Raises:
            LayoutError: Sizes or types do not fit, or an average of integers.
            RankFailedError: A peer has died.
        """
        check_op(op, input.dtype)
        check_sum_dtype("reduce_scatter", self.rank, output, input)
        pair = (output.detach(), input.detach())
        if sizes is not None and len(set(sizes)) > 1:
            check_slices("reduce_scatter", self.rank, sizes, full=input, local=output)
            begin = partial(self._reduce_slices, *pair, list(sizes), op)
            sent, dtype = input.numel() - output.numel(), input.dtype
        else:
            check_full_and_local("reduce_scatter", self.rank, self.size, full=input, local=output)
            begin = partial(self._reduce_scatter, *pair, op)
            sent = ring_share(input.numel(), self.size)
            dtype = self._reduce_scatter_dtype(output, input, op)
        return self.start("reduce_scatter", begin, async_op, sent, dtype.itemsize)

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - c10d's name
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Pending:
        """Collect each rank's slice on every rank, in rank order.

        Args:
            output: Shape (W * S,): slice i is rank i's.
            input: Shape (S,), same dtype. May be output[rank * S : (rank + 1) * S] itself.
            sizes: Number of elements of each rank's slice; None: S for each.
            async_op: Whether to return before the operation is done.

        Raises:
            LayoutError: Sizes or types do not fit.
            RankFailedError: A peer has died.
        """
        check_same_dtype("all_gather", self.rank, output, input)
        pair = (output.detach(), input.detach())
        if sizes is not None and len(set(sizes)) > 1:
            check_slices("all_gather", self.rank, sizes, full=output, local=input)
            begin = partial(self._gather_slices, *pair, list(sizes))
        else:
            check_full_and_local("all_gather", self.rank, self.size, full=output, local=input)
            begin = partial(self._all_gather, *pair)
        sent = (self.size - 1) * input.numel()
        return self.start("all_gather", begin, async_op, sent, input.itemsize)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - c10d's name
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Pending:
        """Send the i-th part of `input` to rank i and collect what the ranks sent here.

        Args:
            output: Shape (sum of output_split_sizes,); must not overlap the input.
            input: Shape (sum of input_split_sizes,), same dtype.
            output_split_sizes: Number of elements from each rank; None: the same from each.
            input_split_sizes: Number of elements to each rank; None: the same to each.
            async_op: Whether to return before the operation is done.

        Raises:
            LayoutError: Sizes or types do not fit.
            RankFailedError: A peer has died.
        """
        check_flat("all_to_all", self.rank, output=output, input=input)
        check_same_dtype("all_to_all", self.rank, output, input)
        place = ("all_to_all", self.rank, self.size)
        received = checked_splits(*place, "output", output, output_split_sizes)
        given = checked_splits(*place, "input", input, input_split_sizes)
        begin = partial(self._all_to_all, output.detach(), input.detach(), received, given)
        sent = input.numel() - given[self.rank]
        return self.start("all_to_all", begin, async_op, sent, input.itemsize)

    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Pending:
        """Overwrite `tensor` on every rank with that of rank `src`.

        Args:
            tensor: Any shape, contiguous; shape and dtype are the same on each rank.
            src: Group rank whose tensor is sent.
            async_op: Whether to return before the operation is done.

        Raises:
            LayoutError: The tensor is not contiguous, or the group has no rank `src`.
            RankFailedError: A peer has died.
        """
        check_contiguous("broadcast", self.rank, tensor)
        check_peer("broadcast", self.rank, self.size, src)
        begin = partial(self._broadcast, tensor.detach().view(-1), src)
        sent = tensor.numel() if self.size > 1 else 0
        return self.start("broadcast", begin, async_op, sent, tensor.itemsize)

    def send(self, tensor: Tensor, peer: int, tag: int = 0, *, async_op: bool = False) -> Pending:
        """Send `tensor` (any shape, contiguous) to `peer`, which must call `recv`.

        Raises:
            LayoutError: The tensor is not contiguous, or the group has no rank `peer`.
            ConfigError: The tag is negative, or 2**30 or more, which are reserved.
            RankFailedError: The peer has died.
        """
        check_message("send", self.rank, self.size, tensor, peer, tag)
        begin = partial(self._send, tensor.detach().view(-1), peer, tag)
        return self.start("send", begin, async_op, tensor.numel(), tensor.itemsize)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0, *, async_op: bool = False) -> Pending:
        """Receive into `tensor` what `peer` sends under this tag; raises as `send` does."""
        check_message("recv", self.rank, self.size, tensor, peer, tag)
        begin = partial(self._recv, tensor.detach().view(-1), peer, tag)
        return self.start("recv", begin, async_op)

    def barrier(self) -> None:
        """Return once every rank of the group has called."""
        with self._call("barrier"):
            dist.barrier(group=self.group)

    def all_gather_object(self, obj: T) -> list[T]:
        """Return every rank's picklable object, in rank order; see `backends.objects`.

        Raises:
            RankFailedError: A peer has died, or what came in its place bears no code of this job.
        """
        with self._call("all_gather_object"):
            return cast("list[T]", gather_objects(self.group, obj))

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s picklable object; what the other ranks pass is ignored.

        Raises:
            RankFailedError: A peer has died, or what came in its place bears no code of this job.
        """
        check_peer("broadcast_object", self.rank, self.size, src)
        with self._call("broadcast_object"):
            return cast(T, broadcast_object(self.group, obj, src))

    def start(
        self,
        operation: str,
        begin: Callable[[], StartedTransfer],
        async_op: bool = True,
        sent: int = 0,
        element_bytes: int = 0,
    ) -> Pending:
        """Begin an operation, which a backend may have besides, counted and timed as all are."""
        self.traffic.count(operation, sent, element_bytes)
        place = self._place(operation)
        with Span(place):
            transfer = begin()
        pending = Pending(transfer, place)
        if not async_op:
            pending.wait()
        return pending

    def _place(self, operation: str) -> OperationContext:
        return OperationContext(
            operation=operation, rank=self.rank, size=self.size, traffic=self.traffic
        )

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        self.traffic.count(operation, 0, 0)
        with Span(self._place(operation)) as span:
            yield
            span.has_waited()

    # --- beginning on c10d, by its own algorithms; shapes and types have been checked ------------

    def _all_reduce_dtype(self, tensor: Tensor, op: ReduceOpName) -> torch.dtype:
        """Return the type in which an all-reduce travels."""
        return torch.float32 if op == "avg" and is_narrow(tensor.dtype) else tensor.dtype

    def _reduce_scatter_dtype(
        self, output: Tensor, source: Tensor, op: ReduceOpName
    ) -> torch.dtype:
        """Return the type in which a reduce-scatter travels."""
        widen = output.dtype != source.dtype or (op == "avg" and is_narrow(source.dtype))
        return torch.float32 if widen else source.dtype

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(source):
            return copy_unless_same(output, source)
        dtype = self._all_reduce_dtype(source, op)
        wire = source.to(dtype) if source.dtype != dtype else output
        copy_unless_same(wire, source)
        work = dist.all_reduce(wire, C10D_OPS[op], group=self.group, async_op=True)
        return StartedTransfer(works=[work], finish=partial(self._settle, output, wire, op))

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        dtype = self._reduce_scatter_dtype(output, source, op)
        wire = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        work = reduce_scatter_flat(
            wire, source.to(dtype), C10D_OPS[op], group=self.group, async_op=True
        )
        return StartedTransfer(works=[work], finish=partial(self._settle, output, wire, op))

    def _all_gather(self, output: Tensor, source: Tensor) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        return StartedTransfer(
            works=[all_gather_flat(output, source, group=self.group, async_op=True)]
        )

    def _all_to_all(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> StartedTransfer:
        if self.size == 1:
            return copy_unless_same(output, source)
        work = dist.all_to_all_single(
            output, source, output_splits, input_splits, group=self.group, async_op=True
        )
        return StartedTransfer(works=[work])

    def _reduce_slices(
        self, output: Tensor, source: Tensor, sizes: list[int], op: ReduceOpName
    ) -> StartedTransfer:
        """Reduce slices of different sizes: each rank is sent the others' of its own."""
        slices = list(torch.split(source, sizes))
        addends = [torch.empty_like(slices[self.rank]) for _ in sizes]
        work = dist.all_to_all(addends, slices, group=self.group, async_op=True)

        def finish() -> None:
            if output.numel():
                combine_in_rank_order(addends, self.rank, op, output)

        return StartedTransfer(works=[work], finish=finish)

    def _gather_slices(self, output: Tensor, source: Tensor, sizes: list[int]) -> StartedTransfer:
        """Collect slices of different sizes."""
        slices, own = list(torch.split(output, sizes)), source.clone()  # it may be one of them
        work = dist.all_to_all(slices, [own] * self.size, group=self.group, async_op=True)
        return StartedTransfer(works=[work])

    def _broadcast(self, tensor: Tensor, src: int) -> StartedTransfer:
        if self._is_still(tensor):
            return StartedTransfer()
        work = dist.broadcast(tensor, group_src=src, group=self.group, async_op=True)
        return StartedTransfer(works=[work])

    def _send(self, tensor: Tensor, peer: int, tag: int) -> StartedTransfer:
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)
        return StartedTransfer(works=[cast("dist.Work", work)])  # None only outside the group

    def _recv(self, tensor: Tensor, peer: int, tag: int) -> StartedTransfer:
        work = dist.irecv(tensor, group=self.group, group_src=peer, tag=tag)
        return StartedTransfer(works=[cast("dist.Work", work)])

    def _is_still(self, tensor: Tensor) -> bool:
        """Say whether nothing moves: one rank, or no elements on any rank."""
        return self.size == 1 or tensor.numel() == 0

    def _settle(self, output: Tensor, wire: Tensor, op: ReduceOpName) -> None:
        """Divide for an average and bring the result into the caller's type."""
        if op == "avg":
            wire.div_(self.size)
        if wire is not output:
            output.copy_(wire)

    # --- counters ---------------------------------------------------------------------------------

    @classmethod
    def traffic_by_group(cls) -> list[GroupTraffic]:
        """Return this rank's counters of each of its groups, in the order of their making.

        Every `Collectives` that lives is counted whose group c10d still has, under its group; a
        `duplicate` counts where its original does. In an in-process world each rank sees its own.
        """
        groups: dict[dist.ProcessGroup, Traffic] = {}
        for group, own in cls._traffics():
            total = groups.setdefault(group, Traffic())
            for operation, traffic in own.items():
                total.add(operation, traffic)
        return [
            GroupTraffic(name=group.group_desc, ranks=_global_ranks(group), traffic=traffic)
            for group, traffic in groups.items()
        ]

    @classmethod
    def counters(cls) -> list[tuple[tuple[int, ...], Traffic]]:
        """Return the counters that this rank's groups count into, with the ranks of each group.

        They go on counting, which costs less to look at than `traffic_by_group`.
        """
        return [(_global_ranks(group), traffic) for group, traffic in cls._traffics()]

    @classmethod
    def _traffics(cls) -> list[tuple[dist.ProcessGroup, Traffic]]:
        """Return the counters of all groups that c10d still has, each once."""
        found: dict[int, tuple[dist.ProcessGroup, Traffic]] = {}
        for one in list(cls._alive.values()):
            if _global_ranks(one.group):
                found.setdefault(id(one.traffic), (one.group, one.traffic))
        return list(found.values())


def _global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the group's ranks in the world; none when this rank has no such group (any more)."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()


def copy_unless_same(output: Tensor, source: Tensor) -> StartedTransfer:
    """Copy on a group of one rank, unless both are the same memory."""
    if output.data_ptr() != source.data_ptr() or output.dtype != source.dtype:
        output.copy_(source)
    return StartedTransfer()
