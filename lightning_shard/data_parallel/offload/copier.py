"""Copies between a rank's device and host memory, counted.

    down    device ──> host    reduced gradients; parameters that user code has changed
    up      host ──> device    updated shards

On a GPU a stream of its own copies, beside what computes, from and to pinned memory. On CPU ranks
the same calls copy between two buffers, one of which stands for the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.streams import streams_of
from lightning_shard.backends.traffic import Traffic
from lightning_shard.data_parallel.content import content


class HostCopier:
    """Copies of one rank; `traffic` counts calls, elements and bytes of "down" and "up" so far."""

    def __init__(self, device: torch.device) -> None:
        self.traffic = Traffic()
        self._device = device
        self._streams = streams_of(device)
        self._stream: Any = None if self._streams is None else self._streams.make(device)
        self._is_busy = False

    def empty(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return host memory of the shape of `like`, pinned where the device is a GPU."""
        pinned = self._streams is not None
        return torch.empty(like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=pinned)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Queue what is started inside beside the current stream, after what is queued there."""
        if self._streams is None:
            yield
            return
        before = self._streams.mark(self._streams.current(self._device))
        with self._streams.use(self._stream):
            self._streams.follow(before)
            yield

    def down(self, source: Tensor, target: Tensor) -> None:
        """Start a copy to the host; `target` may be read after `finish`."""
        self.traffic.count("down", source.numel(), source.itemsize)
        with self.running():
            target.copy_(source, non_blocking=True)
        if self._streams is not None:
            self._streams.keep(source, self._stream)
        self._is_busy = True

    def up(self, source: Tensor, target: Tensor) -> None:
        """Start a copy of what `empty` gave to the device, whose users must `join` first.

        The source must not change before `finish`.
        """
        self.traffic.count("up", target.numel(), target.itemsize)
        with self.running():
            if source.dtype != target.dtype:  # fewer bytes travel in the narrow format
                source = self.empty(source, target.dtype).copy_(source)
            target.copy_(source, non_blocking=True)
        self._is_busy = True

    def fetch(self, source: Tensor) -> Tensor:
        """Return a copy of a tensor on the device in host memory, once it is there."""
        target = self.empty(source)
        self.down(source, target)
        self.finish()
        return target

    def copy(self, way: Literal["down", "up"], source: Tensor, target: Tensor) -> Any:
        """Start a copy whose end has a mark: neither memory may be given back before `follow`."""
        self.traffic.count(way, source.numel(), source.itemsize)
        with self.running():
            target.copy_(source, non_blocking=True)
            return None if self._streams is None else self._streams.mark(self._stream)

    def follow(self, mark: Any) -> None:
        """Let what the current stream does next come after a mark of `copy`."""
        if self._streams is not None:
            self._streams.follow(mark)

    def empty_on_device(self, like: Tensor) -> Tensor:
        """Return memory of the device of the shape and format of host memory."""
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def join(self) -> None:
        """Let what the current stream does next see what has been copied up."""
        if self._streams is not None:
            self.follow(self._streams.mark(self._stream))

    def finish(self) -> None:
        """Return once all copies that have been started are done."""
        if self._streams is not None and self._is_busy:
            self._streams.finish(self._streams.mark(self._stream))
        self._is_busy = False


class HostShard:
    """This rank's elements of one flat buffer in host memory, as the optimizer has them.

        offload="optimizer"     the device keeps these elements, too, in the format of forward and
                                backward: a part of the full parameters, or stage 3's shard
        offload="parameters"    the device has them only while their block is unsharded (stage 3)

    User code may have changed what the device has: its content is known, so that an unchanged one
    is not copied down to look. All parts have the shape (S,) of `tensor`.
    """

    @torch.no_grad()
    def __init__(self, values: Tensor, copier: HostCopier) -> None:
        self.copier = copier
        self.tensor = copier.empty(values).copy_(values)
        self._known: Tensor | None = None

    def know(self, part: Tensor) -> None:
        """Note that a part on the device holds these elements."""
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
        """Start sending the elements up, and bringing all ranks' together from there."""
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
