"""What a Trainer needs to run as one rank of several on the device without elements."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.testing._internal.distributed import fake_pg
from typing_extensions import override

from lightning_shard.backends import liveness, registry
from lightning_shard.backends.base import Backend
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending, StartedTransfer
from lightning_shard.backends.streams import STREAMS
from lightning_shard.strategies import async_sgd
from tests.gpu_like.device import NAME
from tests.gpu_like.mail import SilentMailbox
from tests.gpu_like.marks import WatchedStreams
from tests.gpu_like.peers import Told, caller, is_message
from tests.gpu_like.watch import Watch

T = TypeVar("T")


class GpuLikeAccelerator(Accelerator):
    """The accelerator of the device."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return the number of devices."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return one device for each rank: all of them are the same one."""
        return [torch.device(NAME, 0)] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether there is a device."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name of the accelerator."""
        return NAME


class Waited:
    """Stands for the handles of a transfer."""

    def __init__(self, works: Sequence[dist.Work], follow: Callable[[], None]) -> None:
        self._works, self._follow = works, follow

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._follow()

    def is_completed(self) -> bool:
        """Whether all are completed."""
        return all(work.is_completed() for work in self._works)


class LonelyCollectives(Collectives):
    """Collectives over torch's fake group: this rank's objects stand for those of the others."""

    watch: ClassVar[Watch]
    told: ClassVar[Told]

    @override
    def start(
        self, operation: str, begin: Callable[[], StartedTransfer], async_op: bool = False
    ) -> Pending:
        return super().start(operation, lambda: self._marked(begin), async_op)

    def _marked(self, begin: Callable[[], StartedTransfer]) -> StartedTransfer:
        """Begin a transfer whose handles are seen to be waited for."""
        marks = self.watch.tracker.marks
        marks.begin()
        try:
            transfer = begin()
        finally:
            begun = marks.end()
        waited: Any = Waited(transfer.works, lambda: marks.follow(begun))
        return transfer._replace(works=[waited])

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the object once for each rank; a wait, as sizes are read."""
        self.watch.note("all_gather_object")
        told = self.told[caller()]
        return told.popleft() if told else [obj] * self.size

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object itself; a wait, as its size is read."""
        self.watch.note("broadcast_object")
        told = self.told[caller()]
        return told.popleft() if told else obj

    @override
    def recv(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Pending:
        return self._told(tensor, caller(), super().recv(tensor, *args, **kwargs))

    @override
    def broadcast(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Pending:
        return self._told(tensor, caller(), super().broadcast(tensor, *args, **kwargs))

    def _told(self, tensor: Tensor, place: str, pending: Pending) -> Pending:
        """Let a tensor have the elements that it has got on CPU ranks."""
        told = self.told[place]
        if is_message(tensor) and told:
            elements = told.popleft()
            if elements.shape == tensor.shape:
                self.watch.contents.sent(elements, tensor)
        return pending


class LonelyBackend(Backend):
    """torch's fake process group, whose operations leave what they are given."""

    name: ClassVar[str] = "fake"
    device_types: ClassVar[tuple[str, ...]] = (NAME,)
    matches_tags: ClassVar[bool] = False  # as NCCL

    def unavailable_reason(self) -> str | None:
        """Return None: it can run anywhere."""
        return None

    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Any = None,
    ) -> None:
        """Start the default group."""
        dist.init_process_group(
            f"{NAME}:fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore()
        )

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """Wrap the group."""
        return LonelyCollectives(group)


class OneOfSeveral(LightningEnvironment):
    """Tells a process which rank it is; the others need not be there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        super().__init__()

    @property
    def creates_processes_externally(self) -> bool:
        """Whether others start the ranks."""
        return True

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def global_rank(self) -> int:
        """Return the rank."""
        return self._rank

    def local_rank(self) -> int:
        """Return the rank, on the only host."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""


class NobodyFails:
    """Stands for the lifeline that ranks of processes have: no rank fails, none is sent SIGTERM."""

    requeue_signal = dead_rank = terminated_rank = None
    was_terminated = requeues = stops = False

    def step(self) -> bool:
        """Return whether to stop before this step."""
        return False

    def fail(self, *args: Any) -> bool:
        """Return whether the other ranks have raised the same: nobody is there to say so."""
        return False

    def explain(self, operation: str) -> BaseException:
        """Return the error of an operation whose peer is gone."""
        return RuntimeError(f"{operation} has lost its peer, which was never there.")

    def entered(self, operation: str) -> None:
        """Do nothing."""

    def left(self) -> None:
        """Do nothing."""


def use_lonely_groups(watch: Watch, told: Told) -> None:
    """Have strategies talk over groups without peers on the device, in this process."""
    LonelyCollectives.watch, LonelyCollectives.told = watch, told
    lifeline = NobodyFails()
    cast(Any, liveness).current = lambda: lifeline
    STREAMS[NAME] = WatchedStreams(watch, torch.device(NAME, 0))
    cast(Any, async_sgd).mailbox_type = lambda _: SilentMailbox
    registry._BACKENDS["fake"] = LonelyBackend()
    registry._DEFAULT_OF_DEVICE_TYPE[NAME] = "fake"
