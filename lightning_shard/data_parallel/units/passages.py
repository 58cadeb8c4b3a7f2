"""Where a backward enters a unit's blocks and leaves them: few hooks on the graph, few objects.

    forward     x ──> block 0 ──> block 1 ──> block 2 ──> y      one passage: each block is given
    backward    left <──────────────────────────── entered      what the one before it returned

A block that is given what the block before it has returned goes on with the other's passage:
backward comes through them one after the other, so that the first one's inputs tell of the end of
all. It may enter at each of them, as the gradient of an intermediate result does.

With 200 small blocks, a passage for each made so many objects that collecting garbage took as long
as all hooks together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from lightning_shard.data_parallel.graph_borders import inputs_with_gradient, on_entry, on_exit


class Passage:
    """Calls of blocks, each of which was given what the one before it returned.

    Args:
        on_entry: Called when a backward enters one of the blocks.
        on_exit: Called when a backward has left the first one.

    Attributes:
        output: Returns what the last one has returned; None once that is gone.
    """

    def __init__(
        self, on_entry: Callable[["Passage"], None], on_exit: Callable[["Passage"], None]
    ) -> None:
        self._on_entry, self._on_exit = on_entry, on_exit
        self.output: Callable[[], Tensor | None] = lambda: None

    def enter(self, _: Any) -> None:
        """Note that a backward has come to a block: a hook of its outputs."""
        self._on_entry(self)

    def leave(self, _: Any) -> None:
        """Note that a backward has come through the first block: a hook of its inputs."""
        self._on_exit(self)


class Passages:
    """The passages through the blocks of a unit.

    Attributes:
        on_entry: Called with a passage when a backward enters one of its blocks; twice or more in
            one that goes through several.
        on_exit: Called with a passage when a backward has left its first block.
        open_calls: Passages whose backward has not reached their inputs yet.
        open_backwards: Passages that a backward has entered, and whose inputs it has not reached
            yet; a second one through a retained graph has no open call.
    """

    def __init__(self) -> None:
        self.open_calls: set[Passage] = set()
        self.open_backwards: set[Passage] = set()
        self.on_entry: Callable[[Passage], None] = self.open_backwards.add
        self.on_exit: Callable[[Passage], None] = self.close
        self._running: list[Passage] = []  # forwards, the innermost last
        self._last: Passage | None = None  # whose forward has ended

    @property
    def are_open(self) -> bool:
        """Whether a backward is to come, or under way."""
        return bool(self.open_calls or self.open_backwards)

    def begin_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that the forward of a block begins, with these arguments."""
        inputs = inputs_with_gradient(args, kwargs)
        self._running.append(self._going_on(inputs) or self._begin(inputs))
        self._last = None

    def _going_on(self, inputs: Sequence[Tensor]) -> Passage | None:
        """Return the passage whose last block has returned what the next one is given."""
        last = self._last
        if last is None or last not in self.open_calls or len(inputs) != 1:
            return None
        return last if last.output() is inputs[0] else None

    def _begin(self, inputs: Sequence[Tensor]) -> Passage:
        passage = Passage(self.on_entry, self.on_exit)
        self.open_calls.add(passage)
        # a leaf's hook runs before what else is ready, such as the backward of a weight norm
        if inputs and not any(tensor.is_leaf for tensor in inputs):
            on_exit(inputs, passage.leave)
        return passage

    def end_call(self, outputs: Sequence[Tensor]) -> Passage:
        """Note that a block's forward has ended, with these results that need gradients.

        Returns:
            The passage that the block's call belongs to.
        """
        passage = self._running.pop() if self._running else Passage(self.on_entry, self.on_exit)
        if not outputs:
            return passage
        on_entry(outputs, passage.enter)
        if len(outputs) == 1 and passage in self.open_calls and not outputs[0].is_leaf:
            passage.output = ref(outputs[0])
            self._last = passage
        return passage

    def close(self, passage: Passage) -> None:
        """Note that a backward has left a passage."""
        self.open_calls.discard(passage)
        self.open_backwards.discard(passage)

    def forget(self) -> None:
        """Forget open passages, since none of their backwards comes any more."""
        self.open_calls.clear()
        self.open_backwards.clear()
        self._running.clear()
        self._last = None
