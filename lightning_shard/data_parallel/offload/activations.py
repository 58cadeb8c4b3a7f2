"""Activations in host memory: what autograd saves goes down in forward, and comes up for backward.

    forward    block 0 | block 1 | block 2 | ...             backward   ... block 1 | block 0
    copies         down 0  | down 1  | down 2                       up 1  |  up 0

Each stretch of memory goes once each way, however many tensors are saved of it:

    LEAVING ──leave──> AWAY ──bring──> COMING ──here──> BACK
       └───────────── here: it has not left yet ─────────^

The source is held until the copy down is done, as far as the streams can tell. On the device are
what was saved last and what backward needs next, together at most `in_flight_bytes`, or one
stretch. What has not left yet when backward asks for it is used where it is.

What is held anyway stays: parameters and their views (whose memory ZeRO stage 3 takes and gives
back), buffers, the batch; so do small tensors, those of other classes than torch's own, and what a
backward saves. Source: torch's `save_on_cpu`, and torchtune's activation offloading.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_shard.backends.traffic import Traffic
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.torch_private import (
    in_backward,
    is_traced,
    saving_hook,
    storage_key,
    without_function_modes,
)
from lightning_shard.errors import ConfigError

LEAST_BYTES = 1024  # of what is worth a copy
PLAIN_CLASSES: set[type] = {Tensor}  # of which a storage and its strides are all there is
_PATIENCE = 16  # batches that unused host memory stays for
_SMALLEST_SHARE = 8  # a view of less than an eighth of a storage does not take all of it along

Key = tuple[int, int, torch.dtype, int, int]  # a storage, a version of it, and a stretch
Storages = Callable[[], set[int]]
Size = tuple[int, torch.dtype]


class Saved(Protocol):
    """What stands for a tensor from forward to backward."""

    def tensor(self) -> Tensor:
        """Return the tensor on the device."""


class HostPool:
    """Flat buffers in host memory, lent and given back.

        batch k      take 4 MB, take 1 MB, give 4 MB, take 4 MB, give ...      nothing new
        batch k + n  what nobody has taken for n batches goes

    Attributes:
        num_bytes: Bytes of all buffers, lent ones included.
        most_bytes: The most that they have been.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._free: dict[Size, list[Tensor]] = defaultdict(list)
        self._unused: dict[Size, int] = {}  # the fewest that have been free since the last trim
        self._num_batches = 0
        self.num_bytes = self.most_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer for a tensor of shape (N,)."""
        size = like.numel(), like.dtype
        free = self._free[size]
        if not free:
            self.num_bytes += like.numel() * like.itemsize
            self.most_bytes = max(self.most_bytes, self.num_bytes)
            return self._make(like)
        buffer = free.pop()
        self._unused[size] = min(self._unused.get(size, 0), len(free))
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, to be lent again."""
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def note_batch(self) -> None:
        """Note that a batch begins; let go of buffers that were free for some batches."""
        self._num_batches += 1
        if self._num_batches % _PATIENCE:
            return
        for size, unused in self._unused.items():
            for buffer in self._free[size][:unused]:
                self.num_bytes -= buffer.numel() * buffer.itemsize
            del self._free[size][:unused]
        self._free = defaultdict(list, {size: free for size, free in self._free.items() if free})
        self._unused = {size: len(free) for size, free in self._free.items()}


class ChangedError(ConfigError):
    """A tensor that backward needs was changed in place since forward.

    Its memory should have been changed `expected` times, and was `found` times.
    """

    def __init__(self, shape: Sequence[int], found: int | None, expected: int) -> None:
        super().__init__(
            f"A tensor of shape {tuple(shape)} that backward needs has been modified by an inplace "
            f"operation since forward saved it: it is at version {found}, expected version "
            f"{expected}. Use x = x + y for x += y there, or clone() it before."
        )


class Stretch:
    """Elements of one storage, from forward to backward.

    Attributes:
        is_leaving: Whether the source is held.
        is_ahead: Whether it was brought before anyone asked for it.
    """

    def __init__(
        self,
        tensor: Tensor,
        ends: tuple[int, int],
        copier: HostCopier,
        pool: HostPool,
        on_end: Callable[["Stretch"], None],
    ) -> None:
        # which keeps the storage's number from others
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._copier, self._pool, self._on_end = copier, pool, on_end
        self._shape, self._version = tuple(tensor.shape), tensor._version
        self.first, numel = ends[0], ends[1] - ends[0]
        # which shares the tensor's version, so that changes of any view are seen
        self._device: Tensor | None = tensor.detach().as_strided((numel,), (1,), self.first)
        self.num_bytes = numel * tensor.itemsize
        self.is_leaving, self.is_ahead = True, False
        self._changed: int | None = None
        self._host = pool.take(self._device)
        self._mark = copier.copy("down", self._device, self._host)

    @property
    def is_away(self) -> bool:
        """Whether the elements are in host memory alone."""
        return self._device is None

    def leave(self) -> None:
        """Let go of the source, once the current stream has come to the end of the copy."""
        assert self._device is not None
        self._copier.follow(self._mark)
        self._changed = self._device._version
        self._device, self.is_leaving = None, False

    def bring(self) -> None:
        """Start the copy back to the device."""
        self._device = self._copier.empty_on_device(self._host)
        self._mark = self._copier.copy("up", self._host, self._device)

    def elements(self) -> Tensor:
        """Return the elements (N,) on the device, for what the current stream does next.

        Raises:
            ConfigError: They were changed after they had been saved.
        """
        assert self._device is not None
        if not self.is_leaving:
            self._copier.follow(self._mark)
        version = self._device._version if self.is_leaving else self._changed
        if version != self._version:
            raise ChangedError(self._shape, version, self._version)
        return self._device

    def __del__(self) -> None:
        """Give all memory back; copies that still go on come first."""
        if self._device is not None:
            self._copier.follow(self._mark)
        self._pool.give(self._host)
        self._on_end(self)


class HostActivations:
    """The activations of one rank, in a pool of host memory.

    Attributes:
        in_flight_bytes: Bytes that may be on the device while they travel.
    """

    in_flight_bytes: ClassVar[int] = 512 * 2**20

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copier = HostCopier(device)
        self.pool = HostPool(self._copier.empty)
        self._known: WeakValueDictionary[Key, Stretch] = WeakValueDictionary()
        self._leaving: deque[ReferenceType[Stretch]] = deque()
        self._leaving_bytes = self._ahead_bytes = 0

    @property
    def traffic(self) -> Traffic:
        """Calls, elements and bytes of "down" and "up" so far."""
        return self._copier.traffic

    @contextmanager
    def saving(self, held: Storages) -> Iterator[None]:
        """Keep in host memory what autograd saves inside, which is one forward."""
        try:
            with saved_tensors_hooks(_Forward(self, held).save, _tensor_of):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ConfigError(
                f"activation_offload=True moves what autograd saves, but torch.func lets nobody "
                f"see what it saves ({error}); expected a step that differentiates by backward or "
                f"torch.autograd.grad. Use these, or leave activation_offload out."
            ) from error

    def stretch(self, tensor: Tensor) -> Stretch:
        """Return the stretch of memory that a tensor lies in, which starts its way down if new."""
        first, last = _ends(tensor)
        key = storage_key(tensor), tensor._version, tensor.dtype, first, last
        found = self._known.get(key)
        if found is None:
            found = Stretch(tensor, (first, last), self._copier, self.pool, self._forget)
            self._known[key] = found
            self._leaving.append(ref(found))
            self._leaving_bytes += found.num_bytes
            self._let_go()
        return found

    def _let_go(self) -> None:
        """Let those go that left first, where too much is on its way."""
        while self._is_full(self._leaving_bytes, len(self._leaving)):
            if (first := self._leaving.popleft()()) is not None:
                self._leave(first)

    @classmethod
    def _is_full(cls, num_bytes: int, num_stretches: int) -> bool:
        limit = cls.in_flight_bytes
        return num_bytes > limit and (num_stretches > 1 or not limit)

    def _leave(self, stretch: Stretch) -> None:
        if stretch.is_leaving:
            stretch.leave()
            self._leaving_bytes -= stretch.num_bytes

    @classmethod
    def most_in_flight(cls, sizes: Iterable[int]) -> int:
        """Return the most bytes on the device of stretches of such sizes, saved in this order."""
        leaving, most, total = deque[int](), 0, 0
        for size in sizes:
            leaving.append(size)
            total += size
            while cls._is_full(total, len(leaving)):
                total -= leaving.popleft()
            most = max(most, total)
        return most

    def elements(self, stretch: Stretch) -> Tensor:
        """Return the elements of a stretch on the device, for what the current stream does next."""
        if stretch.is_away:
            stretch.bring()
        elif stretch.is_ahead:
            stretch.is_ahead = False
            self._ahead_bytes -= stretch.num_bytes
        return stretch.elements()

    def bring_ahead(self, stretch: Stretch, needed: Container[Stretch]) -> bool:
        """Start a stretch's way up before anyone asks for it, unless it is here or coming."""
        if not stretch.is_away:
            return True
        total = self._ahead_bytes + stretch.num_bytes
        for weak in tuple(self._leaving):
            if total + self._leaving_bytes <= self.in_flight_bytes:
                break
            if (other := weak()) is not None and other not in needed:
                self._leave(other)
        if self._is_full(total + self._leaving_bytes, 2 if self._ahead_bytes else 1):
            return False
        stretch.bring()
        stretch.is_ahead, self._ahead_bytes = True, total
        return True

    def _forget(self, stretch: Stretch) -> None:
        self._leaving_bytes -= stretch.num_bytes if stretch.is_leaving else 0
        self._ahead_bytes -= stretch.num_bytes if stretch.is_ahead else 0


class _Forward:
    """What one forward has saved, in order: backward needs it the other way round."""

    def __init__(self, owner: HostActivations, held: Storages) -> None:
        self._owner, self._find_held = owner, held
        self._held: set[int] | None = None
        self._stretches: list[ReferenceType[Stretch]] = []
        self._places: WeakKeyDictionary[Stretch, int] = WeakKeyDictionary()
        self._last = self._next = 0  # asked for; and, of those before it, to be brought

    def save(self, tensor: Tensor) -> Saved:
        """Return what stands for a tensor until backward."""
        if not self._travels(tensor):
            return Here(tensor)
        stretch = self._owner.stretch(tensor)
        if stretch not in self._places:
            self._places[stretch] = len(self._stretches)
            self._stretches.append(ref(stretch))
        return _Away(self, stretch, tensor)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors stay that are there until backward anyway."""
        self._held = self._known_held() | {storage_key(one) for one in tensors}

    def _known_held(self) -> set[int]:
        return self._find_held() if self._held is None else self._held

    def _travels(self, tensor: Tensor) -> bool:
        if type(tensor) not in PLAIN_CLASSES or in_backward() or is_traced():
            return False
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.device != self._owner.device or isinstance(tensor._base, nn.Parameter):
            return False
        self._held = self._known_held()
        return stretch_bytes(tensor) > 0 and storage_key(tensor) not in self._held

    def elements(self, stretch: Stretch) -> Tensor:
        """Return the elements of a stretch; those that were saved before it come up beside."""
        found, place = self._owner.elements(stretch), self._places[stretch]
        if place > self._last:  # another backward
            self._next = place
        self._last, self._next = place, min(self._next, place)
        while self._next > 0:
            before = self._stretches[self._next - 1]()
            if before is not None and not self._owner.bring_ahead(before, self._places):
                break
            self._next -= 1
        return found


class Here:
    """A tensor that stays where it is, which nobody may change, as torch has it without hooks."""

    def __init__(self, tensor: Tensor) -> None:
        with without_function_modes():
            self._version = tensor._version
        # what is computed must not hold the graph that holds this
        is_computed = type(tensor) in PLAIN_CLASSES and not tensor.is_leaf
        self._tensor = tensor.detach() if is_computed else tensor

    def tensor(self) -> Tensor:
        """Return the tensor; see `Saved`."""
        with without_function_modes():
            version = self._tensor._version
        if version != self._version:
            raise ChangedError(self._tensor.shape, version, self._version)
        return self._tensor


class _Away:
    """A tensor whose memory is in host memory, or on its way."""

    def __init__(self, forward: _Forward, stretch: Stretch, tensor: Tensor) -> None:
        self._forward, self._stretch = forward, stretch
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() - stretch.first

    def tensor(self) -> Tensor:
        """Return the tensor; see `Saved`."""
        elements = self._forward.elements(self._stretch)
        offset = elements.storage_offset() + self._offset
        return elements.as_strided(self._size, self._stride, offset)


def _tensor_of(saved: Saved) -> Tensor:
    return saved.tensor()


def kept_by(hook: Callable[..., object] | None) -> Callable[[Tensor], Saved] | None:
    """Return what keeps tensors for the forward that a hook of saved tensors is of; else None."""
    forward = getattr(hook, "__self__", None)
    return forward.save if isinstance(forward, _Forward) else None


def stay(tensors: Iterable[Tensor]) -> None:
    """Let tensors stay on the device that the running forward holds until its backward anyway."""
    forward = getattr(saving_hook(), "__self__", None)
    if isinstance(forward, _Forward):
        forward.stay(tensors)


def stretch_bytes(tensor: Tensor) -> int:
    """Return the bytes that go to the host where a tensor does; 0 where that is not worth it."""
    first, last = _ends(tensor)
    num_bytes = (last - first) * tensor.itemsize
    return num_bytes if num_bytes >= LEAST_BYTES else 0


def _ends(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of a tensor's stretch in its storage, and the one after the last."""
    # It is all of the storage, but where the tensor is a small part of it, as a batch of a data
    # set.
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    if not tensor.numel():
        return 0, 0
    ends = zip(tensor.size(), tensor.stride(), strict=True)
    length = 1 + sum(int((size - 1) * step) for size, step in ends)
    offset = int(tensor.storage_offset())
    return (0, numel) if length * _SMALLEST_SHARE >= numel else (offset, offset + length)
