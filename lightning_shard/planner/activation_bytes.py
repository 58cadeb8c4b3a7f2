"""Where the activations of microbatches that are in flight lie: on the device, or on the host."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from lightning_shard.data_parallel.offload.activations import HostActivations


class Kept(NamedTuple):
    """What one stage keeps of one microbatch.

    Attributes:
        total: Bytes that its backward needs.
        moving: Bytes of each stretch of memory that goes to the host, in order; () where nothing
            is offloaded.
    """

    total: int
    moving: tuple[int, ...] = ()


class ActivationBytes(NamedTuple):
    """The most bytes of activations at one time.

    Attributes:
        on_device: Bytes on the device.
        on_host: Bytes in host memory.
    """

    on_device: int
    on_host: int = 0


def at_once(in_flight: Iterable[Kept]) -> ActivationBytes:
    """Return where activations lie while those of some microbatches are kept."""
    kept = list(in_flight)
    on_host = sum(sum(one.moving) for one in kept)
    staying = sum(one.total for one in kept) - on_host
    travelling = HostActivations.most_in_flight(chain.from_iterable(one.moving for one in kept))
    return ActivationBytes(staying + travelling, on_host)


def peak(states: Iterable[Iterable[Kept]]) -> ActivationBytes:
    """Return the most of either memory over the states of a step."""
    found: Iterator[ActivationBytes] = map(at_once, states)
    on_device, on_host = 0, 0
    for one in found:
        on_device, on_host = max(on_device, one.on_device), max(on_host, one.on_host)
    return ActivationBytes(on_device, on_host)
