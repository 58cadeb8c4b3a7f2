"""Averages that an optimizer has seen in `.grad` and keeps for its next step, without a copy.

    one device     zero_grad leaves it the gradient, and backward makes a new one
    here           averages come to lie where the last ones did, unless those are kept: then the
                   engine goes on in new memory, and the optimizer has the old one

An average to which the next one is added, since it was not zeroed, is changed as on one device; of
a buffer where some are zeroed and some are not, this holds for the tensors that the optimizer saw,
not for views that it has made of them.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from lightning_shard.data_parallel.torch_private import are_held_alone, storage_uses


class KeptAverages:
    """Knows whether others hold the memory of some averages."""

    def __init__(self) -> None:
        self._own_uses = 0

    def begin(self, memory: Tensor) -> None:
        """Note that memory is new: who holds it now, its views, will do so for good."""
        self._own_uses = storage_uses(memory)

    def are_there(self, memory: Tensor, views: list[Tensor]) -> bool:
        """Whether others hold averages, while these stand in no `.grad`.

        Args:
            memory: The memory of the averages.
            views: The tensors that an optimizer has seen.
        """
        return storage_uses(memory) > self._own_uses or not are_held_alone(views)


def moved_along(left: Sequence[Tensor], views: list[Tensor], stay: Collection[int]) -> list[Tensor]:
    """Return views of new memory, some of which are the tensors that have been seen.

    Args:
        left: The views of the memory that others keep.
        views: Those of the new memory.
        stay: Indices of those to which new averages are added.
    """
    for index in stay:
        left[index].data = views[index]
    return [left[index] if index in stay else view for index, view in enumerate(views)]
