"""Gloo: torch's own backend for CPU ranks, on one host or several."""

import contextlib
from typing import ClassVar

import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.authentication.addresses import address_towards, interface_of
from lightning_shard.backends.base import Backend
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.debug_wrapper import exchange_collectives
from lightning_shard.backends.rendezvous import host_of_rank_zero, is_on_one_host
from lightning_shard.core import settings


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
