"""The shard of one flat buffer that the optimizer updates, in host memory.

    offload="optimizer"     the device keeps these elements, too, in the format of forward and
                            backward: a part of the full parameters, or stage 3's shard
    offload="parameters"    the device has them only while their block is unsharded (stage 3)

User code may have changed what the device has: its content is known, so that an unchanged one is
not copied down to look.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.content import content
from lightning_shard.data_parallel.offload.copier import HostCopier


class HostShard:
    """This rank's elements of one flat buffer, as the optimizer has them.

    Args:
        values: Shape (S,): the elements, on the device, in the optimizer's format.
        copier: Copies of this rank.

    Attributes:
        tensor: Shape (S,): the elements in host memory.
        copier: Copies of this rank.
    """

    @torch.no_grad()
    def __init__(self, values: Tensor, copier: HostCopier) -> None:
        self.copier = copier
        self.tensor = copier.empty(values).copy_(values)
        self._known: Tensor | None = None

    def know(self, part: Tensor) -> None:
        """Note that a part on the device holds these elements.

        Args:
            part: Shape (S,): in the format of forward and backward.
        """
        self._known = content(part)

    def move(self) -> None:
        """Leave the memory to user code that has kept it, and go on in new memory."""
        self.tensor = self.copier.empty(self.tensor).copy_(self.tensor)

    @torch.no_grad()
    def send_up(self, part: Tensor) -> None:
        """Start writing the elements to a part on the device."""
        with self.copier.running():
            self.copier.up(self.tensor, part)
            self.know(part)

    def unshard(self, part: Tensor, gather: Callable[[], Pending | None]) -> "Pending | Uploaded":
        """Start sending the elements up, and bringing all ranks' together from there.

        Args:
            part: Shape (S,): this rank's part of the full parameters.
            gather: Starts bringing all parts together; None where there is one.
        """
        with self.copier.running():
            self.send_up(part)
            pending = gather()
        return Uploaded(self.copier) if pending is None else pending

    @torch.no_grad()
    def take_in(self, part: Tensor) -> None:
        """Carry user code's changes of a part on the device over to the host.

        Elements keep their digits wherever the part still is what they were rounded to.
        """
        if self._known is not None and bool(content(part) == self._known):
            return
        fetched = self.copier.fetch(part)
        if fetched.dtype == self.tensor.dtype:
            self.tensor.copy_(fetched)
        else:
            edited = fetched != self.tensor.to(fetched.dtype)
            self.tensor.copy_(torch.where(edited, fetched.to(self.tensor.dtype), self.tensor))
        self.know(part)


class Uploaded:
    """Stands for an upload in flight, as `Pending` does for what goes to other ranks."""

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def wait(self) -> None:
        """Let what the current stream does next see what has been copied up."""
        self._copier.join()
