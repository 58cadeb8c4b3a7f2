"""`torch.distributed`'s whole interface, brought into one form: a `Call` for each operation.

torch 2.13 renamed some methods and looks for either name, so each has both.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from lightning_shard.backends.calls import tensor_key
from lightning_shard.backends.group_handle import CoalescedWork, GroupHandle

ANY_SOURCE = -1
Tensors = Tensor | Sequence[Tensor]

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
"""By c10d's names of its collectives, old and new, the operation that each of them is."""


def as_list(tensors: Tensors) -> list[Tensor]:
    """Return c10d's list of tensors, also for the one tensor that some callers pass."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _one_list(lists: Sequence[Tensors]) -> list[Tensor]:
    """Return the tensors of `[[t0, t1]]`, c10d's form for one device, or of `[t0, t1]`."""
    if not lists:
        return []
    return [tensor for entry in lists for tensor in as_list(entry)]


def _reduce_op(opts: Any) -> Any:
    if opts is None:
        return ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    root: int = opts if isinstance(opts, int) else opts.rootRank
    return root


def _of_one(coalesced: Callable[..., Work]) -> Callable[..., Work]:
    """Make the method for one output and input of that for several."""

    def method(self: "PythonGroup", output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        return coalesced(self, [output], [input], opts)

    return method


class PythonGroup(GroupHandle):
    """One rank's handle of one group; a subclass says in `_start` how a call is carried out."""

    @property
    def _device_types(self) -> list[torch.device]:
        """Those in whose tensors c10d sends objects; on the CPU all can (barriers, checkpoints)."""
        return [torch.device("cpu")]

    # --- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce tensors in place, on every rank."""
        listed = as_list(tensors)
        return self._post("all_reduce", listed, reduce_op=_reduce_op(opts), results=listed)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors in place; those of one dtype together."""
        by_dtype: dict[Any, list[Tensor]] = {}
        for tensor in as_list(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        works = [self.allreduce(alike, opts) for alike in by_dtype.values()]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    def reduce(self, tensors: Tensors, opts: Any, op: Any = None) -> Work:
        """Reduce tensors in place, on the root."""
        listed, reduce_op = as_list(tensors), op if op is not None else _reduce_op(opts)
        if isinstance(opts, int) and op is None:
            reduce_op = ReduceOp.SUM
        return self._post("reduce", listed, reduce_op=reduce_op, root=_root(opts), results=listed)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce the r-th tensor of the ranks' lists into rank r's output."""
        return self._post(
            "reduce_scatter", _one_list(inputs), as_list(outputs), reduce_op=_reduce_op(opts)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Reduce several tensors (W * N) and keep this rank's N elements of each."""
        self._check_sizes("reduce_scatter_tensor", outputs, inputs)
        return self._post("reduce_scatter_single", inputs, outputs, reduce_op=_reduce_op(opts))

    reduce_scatter_single = _reduce_scatter_base = _of_one(reduce_scatter_single_coalesced)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- copies --------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any, timeout: Any = None) -> Work:
        """Copy the root's tensors to every rank."""
        del timeout
        listed = as_list(tensors)
        return self._post("broadcast", listed, root=_root(opts), results=listed)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy rank r's tensor to every rank's r-th output; sizes may differ between ranks."""
        del opts
        slots, listed = _one_list(outputs), as_list(inputs)
        sizes = tuple((slot.dtype, slot.numel()) for slot in slots)
        return self._post("all_gather", listed, slots, agreed=sizes, results=[slots])

    def allgather_coalesced(
        self, output_lists: Sequence[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CoalescedWork:
        """All-gather several tensors; `output_lists[k][r]` gets rank r's k-th."""
        pairs = zip(output_lists, inputs, strict=True)
        return CoalescedWork([self.allgather([slots], [part], opts) for slots, part in pairs])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Concatenate several tensors of each rank."""
        del opts
        self._check_sizes("all_gather_into_tensor", inputs, outputs)
        return self._post("all_gather_single", inputs, outputs)

    all_gather_single = _allgather_base = _of_one(all_gather_single_coalesced)
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy rank r's tensor to the root's r-th output."""
        return self._post("gather", as_list(inputs), _one_list(outputs), root=_root(opts))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Copy the root's r-th tensor to rank r."""
        targets = as_list(outputs)
        key = tensor_key(targets)
        return self._post("scatter", _one_list(inputs), targets, agreed=key, root=_root(opts))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Copy rank s's r-th tensor to rank r's s-th output; sizes may differ."""
        del opts
        return self._post("all_to_all", inputs, outputs, agreed=(inputs[0].dtype,))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - c10d's name
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Copy rows of one tensor to and from each rank; without sizes, equally many."""
        del opts
        return self._post(
            "all_to_all_single",
            self._split_rows(input, input_split_sizes),
            self._split_rows(output, output_split_sizes),
            agreed=(input.dtype, tuple(input.shape[1:])),
            results=[output],
        )

    alltoall_base = all_to_all_single

    def gather_common(self, buffer: Any) -> Work:
        """Bring a buffer up to date that the ranks have in common; on shared memory alone."""
        size = (buffer.tensor.dtype, buffer.tensor.numel())
        return self._post("gather_common", [torch.zeros(1)], agreed=size, results=[buffer])

    # --- barriers, sends and receives ----------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        """Wait until every rank has come."""
        del opts
        return self._post("barrier", [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has come; a rank that never comes is named at once."""
        del wait_all_ranks
        work = self._post("monitored_barrier", [])
        work.wait(*(() if timeout is None else (timeout,)))

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        """Send to a rank of the group."""
        return self._post("send", as_list(tensors), root=dst_rank, tag=tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        """Receive from a rank of the group."""
        return self._post("recv", [], as_list(tensors), root=src_rank, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive from whichever rank sends first."""
        return self._post("recv", [], as_list(tensors), root=ANY_SOURCE, tag=tag)
