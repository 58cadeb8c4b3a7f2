"""The base class of the communication backends, and Gloo, torch's own for CPU ranks.

A backend says which devices' tensors it moves, whether it can run here (and if not, what to
install), how its default group starts and which `Collectives` suit it. None falls back to another.
"""

import contextlib
from abc import ABC, abstractmethod
from copy import copy
from datetime import timedelta
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.authentication.addresses import address_towards, interface_of
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.debug_wrapper import debug_name, exchange_collectives
from lightning_shard.backends.rendezvous import host_of_rank_zero, is_on_one_host, join_world
from lightning_shard.core import settings
from lightning_shard.errors import BackendUnavailableError, ConfigError

DEFAULT_TIMEOUT = timedelta(minutes=30)


class Backend(ABC):
    """One way for ranks to exchange tensors.

    Attributes:
        device_types: Device types whose tensors it moves, such as "cpu".
        matches_tags: Whether a receive finds the send of its tag in whatever order they are posted;
            else sends and receives of two ranks must be posted in the same order.
        debug: Whether the ranks compare what they call before; see `backends.debug_wrapper`.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...]]
    matches_tags: ClassVar[bool] = True
    debug: bool = False

    def with_debug(self, debug: bool) -> Self:
        """Return a copy of this backend whose ranks compare their calls, or do not."""
        backend = copy(self)
        backend.debug = debug
        return backend

    @property
    def c10d_name(self) -> str:
        """Name of the backend in c10d, or with `debug` that of its debug wrapper."""
        return debug_name(self.name) if self.debug else self.name

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Say why this backend cannot run here and what to install, or None when it can."""

    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        """Start the default process group; collective over all `world_size` ranks.

        Real-process backends rendezvous at MASTER_ADDR and MASTER_PORT, which the launcher or the
        cluster environment has set, unless a store is given; see `rendezvous.join_world`.
        """
        self.prepare(store)
        join_world(
            self.c10d_name,
            rank=rank,
            world_size=world_size,
            device=device if "cuda" in self.device_types else None,
            timeout=timeout,
            store=store,
        )

    def prepare(self, store: Store | None) -> None:
        """Set what the backend reads as the ranks meet at this store; nothing, as a rule."""
        return

    def of_all_ranks(self, timeout: timedelta) -> Collectives:
        """Wrap the default group, or one beside it that has this backend, checked or not; all call.

        A process keeps the default group that its first run, or its launcher, has made.
        """
        group, there = dist.group.WORLD, dist.get_backend()
        assert group is not None
        own = {one.rpartition(":")[2] for one in there.split(",")}  # of "cpu:gloo,cuda:nccl"
        if self.c10d_name not in own and there != dist.Backend.UNDEFINED:
            group = dist.new_group(backend=self.c10d_name, timeout=timeout)
            assert group is not None
        return self.collectives(group)

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """Wrap `group` in the algorithms that suit this backend."""
        return Collectives(group)

    def check(self, device: torch.device) -> None:
        """Raise BackendUnavailableError or ConfigError unless it can run here, on this `device`."""
        if (reason := self.unavailable_reason()) is not None:
            raise BackendUnavailableError(f"The backend {self.name!r} cannot run here: {reason}")
        if device.type not in self.device_types:
            raise ConfigError(
                f"The backend {self.name!r} moves tensors on {' or '.join(self.device_types)}, "
                f"but this rank's device is {device}. Pass backend='auto', or another accelerator."
            )


class GlooBackend(Backend):
    """CPU tensors over TCP, with exchange-based reduce-scatter and all-gather."""

    name: ClassVar[str] = "gloo"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    @override
    def unavailable_reason(self) -> str | None:
        if dist.is_available() and dist.is_gloo_available():
            return None
        return "this torch was built without Gloo. Install a wheel from pytorch.org."

    @override
    def prepare(self, store: Store | None) -> None:
        """Let Gloo bind to the interface over which the ranks reach each other."""
        if is_on_one_host(store):
            settings.prefer_loopback_for_gloo()
        else:
            _prefer_interface_towards(host_of_rank_zero(store))

    @override
    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        return exchange_collectives(group)


def _prefer_interface_towards(host: str) -> None:
    """Let Gloo bind to the interface that leads to a host, unless the user has chosen one."""
    # It looks up this host's own name, which may stand for an address that others do not reach.
    with contextlib.suppress(OSError):  # a name that is not known yet: Gloo decides
        own = address_towards(host, 0)
        interface = interface_of(own)
        if interface is not None and not settings.is_loopback(own):
            settings.prefer_interface_for_gloo(interface)
