"""What a way of compressing is, and what it makes of each buffer: an exchange.

    Compressor   settings, one for a model            TopK(ratio=0.01)
    Exchange     one for each flat buffer             keeps what was not sent, counts steps

    begin   | proceed                   | wait
    encode  | sum what came, encode     | decode
    send    | send the average          |

All three may start communication, so each rank must call them for its buffers in the same order;
that of the next buffer's `begin` is a good moment for `proceed`, since then most of it moves while
backward computes. Non-finite values stay visible: the average is NaN, and nothing of them is kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_shard.data_parallel.compression.buffer import FlatBuffer

State = dict[str, dict[str, Tensor]]  # kind of state -> name -> tensor


class Compressor(ABC):
    """How gradients are made smaller before they travel: settings without state."""

    @property
    def freezes_variance(self) -> bool:
        """Whether Adam's second moment stays as it is once a warm-up is over.

        Then it is for gradients that Adam gets, and for nothing else.
        """
        return False

    @abstractmethod
    def exchange(self, buffer: FlatBuffer) -> "Exchange":
        """Return what averages `buffer`, with the state that belongs to it."""


class Turn(NamedTuple):
    """When something is encoded.

    Attributes:
        step: How often the buffer was averaged before.
        seed: Of random numbers: another one for each rank, buffer, segment and step, and the same
            ones from run to run.
        num_summed: How many ranks' values have been added up: 1 for those of one rank.
    """

    step: int
    seed: int
    num_summed: int = 1


@dataclass
class Tally:
    """Bytes that this rank has sent, and what it would have sent uncompressed (ring model).

    An exchange counts what it averages; a strategy all that its steps send.
    """

    raw_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 where there was nothing to send."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.raw_bytes + other.raw_bytes, self.sent_bytes + other.sent_bytes)


def if_sound(sound: Tensor, values: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """`values` if the scalar of bool `sound` is true, else `otherwise`, by default zeros.

    Without waiting for a device; on the CPU without a copy.
    """
    if sound.device.type != "cpu":
        return torch.where(sound, values, 0.0 if otherwise is None else otherwise)
    if sound:
        return values
    return torch.zeros_like(values) if otherwise is None else otherwise


class Exchange(ABC):
    """Averages one buffer again and again, with loss.

    Attributes:
        buffer: The buffer.
        step: How often it has been averaged.
        tally: Bytes.
        loss_scale: Asked at each `begin` for the factor that is in the values. What is kept from
            step to step is kept without it, so that it may change.
        keeps_momentum: Whether what travels is summed over steps, so that micro-batches must be
            added up before.
        freezes_variance: Whether Adam's second moment stays as it is, once a warm-up is over.
        froze_variance: Whether it was over the last time.
        variance_steps: Of Adam's own, that a tensor needs before its second moment is frozen.
        sends_momentum: Whether it is Adam's momentum that travels then.
        momentum_factors: Of momentum, where it is kept, by tensor of the buffer.
        fills_variance: Whether a value that had no gradient in the warm-up is given the others'
            second moment, or is left alone, since everything comes as something but zero.
        update_limit: The greatest change of a value in a step from then on, in learning rates.
    """

    keeps_momentum = False
    freezes_variance = False
    froze_variance = False
    variance_steps = 1
    sends_momentum = False
    fills_variance = False
    update_limit = 1.0

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self.step = 0
        self.tally = Tally()
        self.momentum_factors = [0.0] * len(buffer.layout.slots)
        self.loss_scale: Callable[[], float] = lambda: 1.0

    def passes(self, values: Tensor, used: Sequence[bool] | None = None) -> bool:
        """Whether the caller is to average `values` itself, uncompressed: a warm-up.

        Call before each `begin`, with the same `values` and `used`; True takes its place. Each
        rank must call.
        """
        return False

    @abstractmethod
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        """Start averaging; each rank must call.

        Args:
            values: Shape (numel,), any floating type; not needed any more on return.
            out: Where the average goes: shape (numel,), or (segment_numel,) for the own segment.
                May lie in `values`.
            used: By tensor of the buffer, whether this rank has values for it; None for all. Of
                one that no rank has values for, nothing is sent and what is kept stays as it is:
                an optimizer would pass over it.
        """

    @abstractmethod
    def proceed(self) -> None:
        """Start the second half, once; each rank must call before `wait`, which calls else."""

    @abstractmethod
    def wait(self) -> None:
        """Return once `out` holds the average; each rank must call."""

    @abstractmethod
    def state(self) -> State:
        """What further steps depend on, free of ranks and sizes; each rank must call.

        Returns:
            By kind and tensor name: what is sent later is the average over ranks.
        """

    @property
    def kept(self) -> list[Tensor]:
        """The memory that is held between two averages."""
        return []

    @abstractmethod
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take a state of any number of ranks; names that are not here are passed over."""

    def _count(self, sent_bytes: int) -> None:
        self.tally.raw_bytes += self.buffer.dense_bytes
        self.tally.sent_bytes += sent_bytes
