"""Averaged gradients of one flat buffer in host memory, where the optimizer reads them.

    micro-batch 1 ... k-1     reduced, and added up on the device
    micro-batch k             reduced, added, and copied down once, while backward goes on

A backward after that, without `zero_grad` between (several `manual_backward` calls, say), is copied
down as well, and added on the host.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import compress

import torch
from torch import Tensor

from lightning_shard.data_parallel.kept_averages import KeptAverages, moved_along
from lightning_shard.data_parallel.offload.copier import HostCopier


class HostGradients:
    """The host's side of one buffer of averages.

    Args:
        copier: Copies of this rank.
        views_of: Returns each parameter's elements as views of a tensor like the buffer.

    Attributes:
        tensor: Shape (S,): the averages that are on the host; None before the first.
        views: View of each parameter's elements.
        are_here: Whether what has been averaged since `zero_grad` is on the host.
    """

    def __init__(self, copier: HostCopier, views_of: Callable[[Tensor], list[Tensor]]) -> None:
        self._copier, self._views_of = copier, views_of
        self.tensor: Tensor | None = None
        self.views: list[Tensor] = []
        self.are_here = False
        self._kept = KeptAverages()

    def _part_from_kept(self, stay: Collection[int]) -> None:
        """Go on in new memory where others have kept averages that new ones would overwrite."""
        assert self.tensor is not None
        self._copier.finish()
        self.tensor = self._copier.empty(self.tensor).copy_(self.tensor)
        self.views = moved_along(self.views, self._views_of(self.tensor), stay)
        self._kept.begin(self.tensor)

    @torch.no_grad()
    def land(self, averages: Tensor, held: Sequence[bool]) -> None:
        """Copy averages down; those that are here already are added to.

        Args:
            averages: Shape (S,): new averages, on the device.
            held: Whether each parameter has an average here since `zero_grad`.
        """
        if self.tensor is None:
            self.tensor = self._copier.empty(averages)
            self.views = self._views_of(self.tensor)
            self._kept.begin(self.tensor)
        stay = {*compress(range(len(held)), held)} if self.are_here else set()
        if len(stay) < len(held) and self._kept.are_there(self.tensor, self.views):
            self._part_from_kept(stay)
        if not self.are_here or not any(held):
            self._copier.down(averages, self.tensor)
        else:
            come = self._views_of(self._copier.fetch(averages))
            for view, more, adds in zip(self.views, come, held, strict=True):
                view.add_(more) if adds else view.copy_(more)
        self.are_here = True

    def ready(self) -> list[Tensor]:
        """Return the view of each parameter's elements, once all copies are done."""
        self._copier.finish()
        return self.views

    def drop(self) -> None:
        """Let go of the averages and their memory."""
        self.tensor, self.views, self.are_here = None, [], False
