"""Tells an `Order` what operations on the device read, write, make and free.

aten operations       by their schemas: on the current stream; of pinned memory alone: by the host
c10d operations       on their group's stream, after the current one; handles are waited for
resizing a storage    frees memory, or makes it anew
the end of a storage  frees memory, unless a handle that nobody has waited for still has it
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.gpu_like.order import Agent, Clock, Marks, Order, Span

# What comes first among the arguments of c10d's operations: what they write, then what they read.
_IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")
_ONLY_READS = ("send", "barrier")
_ONLY_WRITES = ("recv_", "recv_any_source_")
_READS_NO_ELEMENT = ("empty", "_like", "new_", "resize_", "set_", "detach", "alias", "lift")


class Tracker:
    """Follows the memory of the device, and pinned memory.

    Args:
        is_here: Whether a tensor lies on the device; the others are the host's.
    """

    def __init__(self, is_here: Callable[[Tensor], bool], where: Callable[[], str]) -> None:
        self._is_here, self._where = is_here, where
        self.order = Order()
        self.stream = Agent("stream")
        self.marks = Marks(self.order, lambda: self.stream)
        self._groups: dict[str, Agent] = {}
        self._to_wait_for: dict[int, Clock] = {}  # by memory: what functional collectives write
        self._host_waits = False

    def __enter__(self) -> "Tracker":
        self._resize = torch.UntypedStorage.resize_
        tracker = self

        def resize_(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            result = tracker._resize(storage, size)
            tracker._resized(int(storage._cdata), before, size)
            return result

        cast(Any, torch.UntypedStorage).resize_ = resize_
        return self

    def __exit__(self, *error: Any) -> None:
        cast(Any, torch.UntypedStorage).resize_ = self._resize

    def wait(self) -> None:
        """Note that the host waits for the current stream, now and after the running operation."""
        self.order.host.follow(self.stream.clock)
        self._host_waits = True

    def pinned(self, tensor: Tensor) -> None:
        """Note that a tensor lies in pinned memory, which streams and the host use."""
        self._watch_memory(tensor, None)

    def operation(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        by_host: bool,
    ) -> None:
        """Note one operation that has been carried out."""
        name = func.name().split("::")[-1]
        if func.namespace == "prim":  # asks for a property
            return
        if func.namespace == "c10d":
            self._collective(name, args)
        elif func.namespace == "_c10d_functional":
            self._functional(name, args, result)
        else:
            reads, writes = _arguments(func, args, kwargs)
            agent = self.order.host if by_host else self.stream
            if not by_host:
                self._watch_all(result)
                self._watch_all((args, kwargs))
            fresh = [] if func.is_view else _others(result, (args, kwargs))
            read = [] if any(part in name for part in _READS_NO_ELEMENT) or func.is_view else reads
            what = f"{name} {self._where()}"
            self.order.launch(agent, _spans(read), _spans([*writes, *fresh]), what)
        if self._host_waits:
            self.order.host.follow(self.stream.clock)
            self._host_waits = False

    def _collective(self, name: str, args: Sequence[Any]) -> None:
        first = _tensors(args[0])
        second = _tensors(args[1]) if len(args) > 1 else []
        if name.startswith(_IN_PLACE):
            reads, writes = first, first
        elif name.startswith(_ONLY_READS):
            reads, writes = first, []
        elif name.startswith(_ONLY_WRITES):
            reads, writes = [], first
        else:
            reads, writes = second, first
        group = next((one for one in args if isinstance(one, torch.ScriptObject)), None)
        title = "a group" if group is None else _name_of(group)
        self._watch_all((reads, writes))
        spans = _spans(reads), _spans(writes)
        what = f"{name} {self._where()}"
        self.marks.collective(self._group(title), *spans, what, (reads, writes))

    def _functional(self, name: str, args: Sequence[Any], result: Any) -> None:
        given, made = _tensors(args[0]), _tensors(result)
        if name.startswith("wait_tensor"):
            for tensor in given:
                self.stream.follow(self._to_wait_for.pop(key_of(tensor), {}))
            return
        self._watch_all((given, made))
        group = self._group(str(args[-1]))
        group.follow(self.stream.clock)
        self.order.launch(group, _spans(given), _spans(made), f"{name} {self._where()}")
        for tensor in made:
            self._to_wait_for[key_of(tensor)] = {**group.clock}

    def _group(self, name: str) -> Agent:
        return self._groups.setdefault(name, Agent(f"group {name}"))

    def _watch_all(self, nested: Any) -> None:
        for tensor in _tensors(nested):
            if self._is_here(tensor):
                self._watch_memory(tensor, self.stream)

    def _watch_memory(self, tensor: Tensor, by: Agent | None) -> None:
        key, storage = key_of(tensor), tensor.untyped_storage()
        if not self.order.knows(key) and storage.nbytes():
            self.order.made(key, storage.nbytes(), by, f"memory made {self._where()}")
            weakref.finalize(storage, self._ended, key)

    def _ended(self, key: int) -> None:
        self._to_wait_for.pop(key, None)
        self.order.freed(key, f"the end of the last tensor {self._where()}")

    def _resized(self, key: int, before: int, after: int) -> None:
        if not self.order.knows(key) and not (before == 0 and after):
            return
        what = f"resize_({'0' if after == 0 else 'more'}) {self._where()}"
        self.order.freed(key, what)
        if after:
            self.order.made(key, after, self.stream, what)


def key_of(tensor: Tensor) -> int:
    """Return the number of the memory that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(nested: Any) -> list[Tensor]:
    return [one for one in tree_leaves(nested) if isinstance(one, Tensor)]


def _spans(tensors: Iterable[Tensor]) -> list[Span]:
    spans = []
    for one in tensors:
        if one.numel():
            last = sum((n - 1) * stride for n, stride in zip(one.shape, one.stride(), strict=True))
            start = one.storage_offset() * one.itemsize
            spans.append(Span(key_of(one), start, start + (last + 1) * one.itemsize))
    return spans


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors among the arguments that an operation reads, and those that it writes."""
    reads, writes = [], []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_write else reads).extend(_tensors(value))
    return reads, writes


def _others(result: Any, given: Any) -> list[Tensor]:
    """Return the results that lie in memory of none of the arguments."""
    known = {key_of(tensor) for tensor in _tensors(given)}
    return [tensor for tensor in _tensors(result) if key_of(tensor) not in known]


def _name_of(group: Any) -> str:
    return str(dist.ProcessGroup.unbox(group).group_name)
