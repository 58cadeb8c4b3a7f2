"""One buffer that the ranks of a host have in common, as the engine uses it.

               between updates                     inside an update
    read       the one copy, with own edits        the same
    write      an edit of this rank's alone        its own part is written for all
    gather     other edits are dropped, and edits of the own part are given to all; with none,
               nothing is copied

So code that edits a parameter meets what it would where each rank has a copy. An update that writes
`part` alone needs no `open`, which has the system map the part's pages anew, twice a step.
"""

from collections.abc import Iterable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.pending import Pending


class CommonBuffer(Protocol):
    """A flat buffer of which each rank of a group on one host owns a part.

    Attributes:
        group: The group whose ranks have it.
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
