"""The bytes of all tensors that are alive at one time, and the most there have been.

    op ──> result ──> its storage is alive until nobody has it
                      alive  ▁▃▅▇█▇▅▃     most: what an allocator must have had at one time

It sees real tensors and those without elements alike, so that a prediction and its measurement are
made by the same counter. What an operation allocates inside and frees before it returns (workspace
of a kernel) is not seen, nor is what an allocator rounds up.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_shard.data_parallel.torch_private import TorchDispatchMode, storage_key


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is entered.

    Attributes:
        alive: Bytes of such storages now.
        most: The most that were alive at one time.
        moved: Bytes of arguments and results of operations that compute, each once an operation:
            what has gone through memory where nothing is fused. Matrix products, attention and
            convolutions do not count: their time is that of their arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = self.moved = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note the storages of its results."""
        result = func(*args, **(kwargs or {}))
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        keys = {self._key(one) for one in given}
        for one in results:
            if self._key(one) not in keys:  # else a view, or written in place
                self._note(one)
        is_arithmetic = getattr(func, "overloadpacket", None) in flop_registry
        if not is_arithmetic and any(self._key(one) not in keys for one in results):
            self.moved += sum(map(_num_bytes, [*given, *results]))
        return result

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return storage_key(tensor)

    def _note(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper, whose own tensors are seen
            return
        key, size = storage_key(tensor), storage.nbytes()
        if key not in self._known:
            self._known[key] = size
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.alive -= self._known.pop(key, 0)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
