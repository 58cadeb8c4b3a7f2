"""Random programs of collectives: how hypothesis draws them, and how a rank runs one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.backends.in_process.numpy_model import (
    DTYPES,
    KINDS,
    PEER_KINDS,
    Step,
    data,
    exchange_size,
    partners,
    reduce_ops,
    sized,
    thing,
)

# torch 2.13 renamed these, torch 2.11 has the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ASYNC_KINDS = frozenset(KINDS) - {
    "monitored_barrier",
    "recv_from_anybody",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
}


@dataclass(frozen=True)
class Program:
    """Steps that every rank goes through in one order, each for the groups that it is in."""

    num_ranks: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


@st.composite
def programs(draw: st.DrawFn, max_ranks: int = 5, max_steps: int = 8) -> Program:
    """Draw a program; it has no deadlock."""
    num_ranks = draw(st.integers(2, max_ranks))
    subsets = st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True)
    groups = draw(st.lists(subsets.map(lambda s: tuple(sorted(s))), min_size=1, max_size=4))
    num_steps = draw(st.integers(1, max_steps))
    steps = [draw(_steps(draw(st.sampled_from(groups)), k)) for k in range(num_steps)]
    return Program(num_ranks, tuple(groups), tuple(steps))


@st.composite
def _steps(draw: st.DrawFn, ranks: tuple[int, ...], number: int) -> Step:
    size = len(ranks)
    alone = (*PEER_KINDS, "ring")
    kind = draw(st.sampled_from([kind for kind in KINDS if size > 1 or kind not in alone]))
    dtype = draw(st.sampled_from(DTYPES))
    return Step(
        kind=kind,
        number=number,
        ranks=ranks,
        dtype=dtype,
        shape=tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        op=draw(st.sampled_from(reduce_ops(dtype))),
        root=draw(st.integers(0, size - 1)),
        sizes=tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))),
        tag=draw(st.integers(0, 2)),
        layout=draw(st.sampled_from(["plain", "transposed", "strided"])),
        wait_after=draw(st.integers(0, 3)) if kind in ASYNC_KINDS else 0,
    )


def other_step(step: Step) -> Step:
    """Return a step that a rank may wrongly call in place of `step`, in the same group."""
    if step.kind in PEER_KINDS or step.kind == "ring":
        return replace(step, kind="barrier", wait_after=0)
    if step.kind == "all_reduce":
        return replace(step, shape=(*step.shape, 2), wait_after=0)
    return replace(step, kind="all_reduce", wait_after=0)


# --- one rank's side ---------------------------------------------------------------------------


@dataclass
class Pending:
    """A step that was called: what to wait for, and what its tensors will hold."""

    step: Step
    works: Sequence[Any]
    results: list[Any]

    def finish(self) -> list[Any]:
        """Wait and return the results."""
        for work in self.works:
            work.wait()
        return self.results


class RankRun:
    """One rank's run of a program.

    Args:
        tolerated: An error that ends a step, and not the program; it is the step's result.
    """

    def __init__(
        self, program: Program, rank: int, tolerated: type[Exception] | tuple[()] = ()
    ) -> None:
        self._program, self._rank, self._tolerated = program, rank, tolerated
        self._groups = {ranks: dist.new_group(list(ranks)) for ranks in program.groups}
        self.results: dict[int, list[Any] | Exception] = {}

    def run(self, swap: Callable[[Step], Step] = lambda step: step) -> "RankRun":
        """Go through the steps, and wait for each operation when its time has come."""
        pending: list[Pending] = []
        for step in self._program.steps:
            if self._rank in step.ranks:
                self._try(step, lambda s=step: pending.extend(self._call(swap(s))))
            for due in [p for p in pending if p.step.number + p.step.wait_after <= step.number]:
                pending.remove(due)
                self._finish(due)
        for left in reversed(pending):
            self._finish(left)
        return self

    def _finish(self, due: Pending) -> None:
        self._try(due.step, lambda: self.results.__setitem__(due.step.number, due.finish()))

    def _try(self, step: Step, action: Callable[[], None]) -> None:
        try:
            action()
        except self._tolerated as error:
            self.results[step.number] = error

    def _call(self, step: Step) -> Iterator[Pending]:
        place = step.ranks.index(self._rank)
        if place not in partners(step):
            self.results[step.number] = []
            return
        call = Calls(step, place, self._groups[step.ranks], step.wait_after > 0)
        works, results = getattr(call, step.kind)()
        yield Pending(step, [work for work in works if work is not None], results)


@dataclass(frozen=True)
class Calls:
    """The calls of `torch.distributed` for each kind of step, as one member makes them."""

    step: Step
    place: int
    group: Any
    is_async: bool

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.step.op)

    @property
    def root(self) -> int:
        return self.step.ranks[self.step.root]

    @property
    def receiver(self) -> int:
        return self.step.ranks[(self.step.root + 1) % len(self.step.ranks)]

    def mine(self, shape: Sequence[int], shard: int = 0) -> Tensor:
        return self.laid_out(data(self.step, self.step.ranks[self.place], shape, shard))

    def empty(self, shape: Sequence[int]) -> Tensor:
        return self.laid_out(np.full(shape, 77).astype(np.float32))

    def laid_out(self, array: Any) -> Tensor:
        """Return a tensor with these values that lies in memory as the step says."""
        tensor = torch.from_numpy(np.array(array)).to(getattr(torch, self.step.dtype))
        if self.step.layout == "transposed" and tensor.ndim > 1:
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        if self.step.layout == "strided" and tensor.ndim:
            wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
            wide[..., 1] = tensor
            return wide[..., 1]
        return tensor

    def contiguous(self, shape: Sequence[int], shard: int | None = None) -> Tensor:
        return (self.empty(shape) if shard is None else self.mine(shape, shard)).contiguous()

    def keywords(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.is_async}

    def all_reduce(self) -> Any:
        tensor = self.mine(self.step.shape)
        return [dist.all_reduce(tensor, self.op, **self.keywords())], [tensor]

    def coalesced_all_reduce(self) -> Any:
        tensors = [self.contiguous(self.step.shape, k) for k in range(3)]
        with _coalescing_manager(self.group, async_ops=self.is_async) as works:
            for tensor in tensors:
                dist.all_reduce(tensor, self.op, group=self.group)
        return [works] if self.is_async else [], tensors

    def reduce_to_root(self) -> Any:
        tensor = self.mine(self.step.shape)
        return [dist.reduce(tensor, self.root, self.op, **self.keywords())], [tensor]

    def broadcast(self) -> Any:
        tensor = self.mine(self.step.shape)
        return [dist.broadcast(tensor, self.root, **self.keywords())], [tensor]

    def all_gather(self) -> Any:
        slots = [self.empty(sized(self.step, k)) for k in range(len(self.step.ranks))]
        part = self.mine(sized(self.step, self.place))
        return [dist.all_gather(slots, part, **self.keywords())], slots

    def all_gather_single(self) -> Any:
        output = self.contiguous((2 * len(self.step.ranks), *self.step.shape))
        part = self.contiguous((2, *self.step.shape), 0)
        return [_all_gather_single(output, part, **self.keywords())], [output]

    def reduce_scatter(self) -> Any:
        output = self.empty(sized(self.step, self.place))
        parts = [self.mine(sized(self.step, k), k) for k in range(len(self.step.ranks))]
        return [dist.reduce_scatter(output, parts, self.op, **self.keywords())], [output]

    def reduce_scatter_single(self) -> Any:
        output = self.contiguous((2, *self.step.shape))
        full = self.contiguous((2 * len(self.step.ranks), *self.step.shape), 0)
        return [_reduce_scatter_single(output, full, self.op, **self.keywords())], [output]

    def gather(self) -> Any:
        is_root = self.place == self.step.root
        slots = [self.empty(self.step.shape) for _ in self.step.ranks] if is_root else []
        part = self.mine(self.step.shape)
        return [dist.gather(part, slots or None, dst=self.root, **self.keywords())], slots

    def scatter(self) -> Any:
        is_root = self.place == self.step.root
        parts = [self.mine(self.step.shape, k) for k in range(len(self.step.ranks))]
        output = self.empty(self.step.shape)
        given = parts if is_root else None
        return [dist.scatter(output, given, src=self.root, **self.keywords())], [output]

    def _exchange_shapes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        places = range(len(self.step.ranks))
        sent = [(exchange_size(self.step, self.place, k), *self.step.shape) for k in places]
        got = [(exchange_size(self.step, k, self.place), *self.step.shape) for k in places]
        return sent, got

    def all_to_all(self) -> Any:
        sent, got = self._exchange_shapes()
        parts = [self.mine(shape, k) for k, shape in enumerate(sent)]
        slots = [self.empty(shape) for shape in got]
        return [dist.all_to_all(slots, parts, **self.keywords())], slots

    def all_to_all_single(self) -> Any:
        sent, got = self._exchange_shapes()
        rows = torch.cat([self.mine(shape, k) for k, shape in enumerate(sent)])
        output = self.contiguous((sum(s[0] for s in got), *self.step.shape))
        splits = [s[0] for s in got], [s[0] for s in sent]
        return [dist.all_to_all_single(output, rows, *splits, **self.keywords())], [output]

    def even_all_to_all_single(self) -> Any:
        shape = (2 * len(self.step.ranks), *self.step.shape)
        output = self.contiguous(shape)
        rows = self.contiguous(shape, 0)
        return [dist.all_to_all_single(output, rows, **self.keywords())], [output]

    def barrier(self) -> Any:
        return [dist.barrier(**self.keywords())], []

    def monitored_barrier(self) -> Any:
        self.group.monitored_barrier()
        return [], []

    def send_recv(self) -> Any:
        tag, is_sender = self.step.tag, self.place == self.step.root
        tensor = (self.mine if is_sender else self.empty)(self.step.shape)
        if is_sender:
            send = dist.isend if self.is_async else dist.send
            return [send(tensor, self.receiver, self.group, tag)], []
        if self.is_async:
            return [dist.irecv(tensor, self.root, self.group, tag)], [tensor]
        assert dist.recv(tensor, self.root, self.group, tag) == self.root
        return [], [tensor]

    def recv_from_anybody(self) -> Any:
        tag = 100 + self.step.number  # nobody else's
        if self.place == self.step.root:
            return [dist.send(self.mine(self.step.shape), self.receiver, self.group, tag)], []
        tensor = self.empty(self.step.shape)
        assert dist.recv(tensor, None, self.group, tag) == self.root
        return [], [tensor]

    def ring(self) -> Any:
        size = len(self.step.ranks)
        after, before = (self.step.ranks[(self.place + k) % size] for k in (1, -1))
        part, got = self.mine(self.step.shape), self.empty(self.step.shape)
        tag = 200 + self.step.number  # nobody else's: after a fault, halves may be left over
        ops = [
            dist.P2POp(dist.isend, part, after, self.group, tag),
            dist.P2POp(dist.irecv, got, before, self.group, tag),
        ]
        works = dist.batch_isend_irecv(ops)
        if not self.is_async:
            for work in works:
                work.wait()
        return works, [got]

    # --- objects -------------------------------------------------------------------------------

    def my_thing(self) -> Any:
        return thing(self.step, self.step.ranks[self.place])

    def all_gather_object(self) -> Any:
        things = [None] * len(self.step.ranks)
        dist.all_gather_object(things, self.my_thing(), self.group)
        return [], things

    def broadcast_object_list(self) -> Any:
        is_root = self.place == self.step.root
        things = [self.my_thing(), self.step.number] if is_root else [None, None]
        dist.broadcast_object_list(things, self.root, self.group)
        return [], things

    def gather_object(self) -> Any:
        things: list[Any] = [None] * len(self.step.ranks) if self.place == self.step.root else []
        dist.gather_object(self.my_thing(), things or None, self.root, self.group)
        return [], things

    def scatter_object_list(self) -> Any:
        given: list[Any] = [thing(self.step, rank) for rank in self.step.ranks]
        got: list[Any] = [None]
        is_root = self.place == self.step.root
        dist.scatter_object_list(got, given if is_root else None, self.root, self.group)
        return [], got

    def send_object_list(self) -> Any:
        if self.place == self.step.root:
            dist.send_object_list([self.my_thing()], self.receiver, self.group)
            return [], []
        got: list[Any] = [None]
        dist.recv_object_list(got, self.root, self.group)
        return [], got
