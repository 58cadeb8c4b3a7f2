"""Averages flat buffers over the ranks, fragment by fragment, compressed or not."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout.flat import build_layout
from lightning_shard.data_parallel.compression import Codec, Compressor, Exchange, FlatBuffer, Tally
from lightning_shard.data_parallel.compression.compressor import State
from lightning_shard.data_parallel.compression.state import load_state, own_state, shared_by_all
from lightning_shard.errors import ConfigError


class Arrival(Protocol):
    """A handle on an average that is on its way."""

    def wait(self) -> None:
        """Return once the ranks' mean has come."""


class Sender:
    """Averages buffers over the ranks, several at a time; each rank must call in the same order."""

    def __init__(
        self,
        collectives: Collectives,
        fragments: Sequence[Mapping[str, Tensor]],
        compressor: Compressor | None,
    ) -> None:
        self._collectives = collectives
        self._compressor = compressor
        self._exchanges: list[Exchange] = []
        for number, tensors in enumerate(fragments) if compressor is not None else ():
            assert compressor is not None
            layout = build_layout(
                [(n, tuple(one.shape)) for n, one in tensors.items()], num_shards=1
            )
            device = next(iter(tensors.values())).device
            check_real(tensors, collectives.rank)
            buffer = FlatBuffer(layout=layout, ranks=collectives, number=number, device=device)
            self._exchanges.append(compressor.exchange(buffer))

    @property
    def compresses(self) -> bool:
        """Whether fragments are compressed; a fragment must then be sent as a whole."""
        return bool(self._exchanges)

    def send(self, buffer: Tensor, fragment: int | None = None) -> Arrival:
        """Start to average a buffer, shape (n,), in place.

        Values of no fragment are not compressed.
        """
        exchange = self._exchanges[fragment] if self.compresses and fragment is not None else None
        if exchange is None or exchange.passes(buffer):
            return self._collectives.all_reduce(buffer, "avg", async_op=True)
        exchange.begin(buffer, buffer)
        return exchange

    def tally(self) -> Tally:
        """Return the bytes that this rank has sent compressed, and would have sent dense."""
        return sum((exchange.tally for exchange in self._exchanges), Tally())

    def state(self) -> dict[str, Any]:
        """Return what of the compression's state all ranks share; nothing may be on its way."""
        if self._compressor is None:
            return {}
        return shared_by_all(self._compressor, self._exchanges)

    def own_state(self) -> State:
        """Return what compression keeps on this rank; nothing may be on its way."""
        return own_state(self._exchanges)

    def load(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Take over what `state` returned for any fragments and any number of ranks.

        `own` is what `own_state` returned on this rank of as many; None to go on from averages.
        """
        if self._compressor is not None:
            load_state(self._compressor, self._exchanges, state, own)


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the values on the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}


def check_real(tensors: Mapping[str, Tensor], rank: int) -> None:
    """Raise ConfigError for complex numbers, which no compressor takes."""
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise ConfigError(
                f"Rank {rank}: the parameter {name!r} is of {tensor.dtype}, but compression is for "
                f"real numbers only. Leave compression out, or keep real and imaginary parts in a "
                f"parameter of their own (torch.view_as_real)."
            )


def check_compressor(compressor: Compressor | None) -> None:
    """Raise ConfigError for a compressor that counts on a momentum: the outer optimizer has one."""
    keeps_momentum = isinstance(compressor, Codec) and compressor.momentum
    if compressor is not None and (keeps_momentum or compressor.freezes_variance):
        raise ConfigError(
            f"{type(compressor).__name__} keeps a momentum, or Adam's, of the gradients of every "
            f"step, but under local SGD what travels is the change of many steps, and the outer "
            f"optimizer has a momentum. Pass TopK(momentum=0.0), OneBit(adam=False) or "
            f"PowerSGD(adam=False)."
        )
