"""A buffer that a part of each step needs: its memory comes and goes, its views stay.

    needed       flat   [ v0 | v1 | v2 ]
    given back   ordinary memory   freed; the views keep their shapes and places
                 shared memory     idle; who needs memory there first takes it, and the views go

To make the views of small parameters anew takes longer than to copy gradients into them, and so
many new objects have Python collect garbage.
"""

from torch import Tensor

from lightning_shard.data_parallel.flat_memory import FlatMemory


class KeptViews:
    """Keeps one buffer while it is not needed.

    Args:
        memory: Where the buffer comes from.
    """

    def __init__(self, memory: FlatMemory) -> None:
        self._memory = memory
        self._kept: tuple[Tensor, list[Tensor]] | None = None

    def keep(self, flat: Tensor, views: list[Tensor]) -> None:
        """Give the memory of a buffer back, which nobody reads any more, and keep its views.

        Args:
            flat: The buffer, all of its memory.
            views: Its views, in any order.
        """
        self._kept = flat, views  # before others may ask for it
        if flat.untyped_storage().resizable():
            flat.untyped_storage().resize_(0)
        elif not self._memory.set_aside(flat, self.let_go):
            self._kept = None

    def take(self) -> tuple[Tensor, list[Tensor]] | None:
        """Return the buffer with any content, and its views; None where there is none."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        if kept[0].untyped_storage().resizable():
            kept[0].untyped_storage().resize_(kept[0].nbytes)
        else:
            self._memory.take_up(kept[0])
        return kept

    def let_go(self) -> None:
        """Keep nothing any longer."""
        self._kept = None
