"""A compressor, the settings of a way of compressing, and the exchange that it makes per buffer.

    begin   | proceed                   | wait
    encode  | sum what came, encode     | decode
    send    | send the average          |

All three may start communication, so each rank must call them for its buffers in the same order;
that of the next buffer's `begin` is a good moment for `proceed`, since then most of it moves while
backward computes. Non-finite values stay visible: the average is NaN, and nothing of them is kept.

values    [ slot ][ slot ]..[ slot ].......   . = gaps: alignment and padding, always zero
segments  |-- rank 0 --|-- rank 1 --|         one for each rank, all of one size
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.layout import FlatLayout

State = dict[str, dict[str, Tensor]]  # kind of state -> name -> tensor


def unscaled() -> None:
    """Return the loss scale where there is none."""


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """A flat buffer: where its tensors lie and which ranks average it.

    Attributes:
        layout: Layout of the tensors; it has one shard, or one per rank.
        ranks: Collectives over the ranks that average the buffer.
        keeps_all: Whether each rank needs the full average, or its own segment only.
        number: Number that tells this buffer from the others of a model, for random streams.
        device: Device on which the values lie.
        dense_itemsize: Bytes of a value that travels uncompressed.
        loss_scale: Returns at each `begin` the loss scale that is in the values, a tensor of
            shape () on the buffer's device, or None. State is kept without it from step to step.
    """

    layout: FlatLayout
    ranks: Collectives
    keeps_all: bool = True
    number: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dense_itemsize: int = 4
    loss_scale: Callable[[], Tensor | None] = unscaled

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer."""
        return self.layout.full_numel

    @property
    def segment_numel(self) -> int:
        """Number of elements of each rank's segment; all segments may be longer than the buffer."""
        return -(-self.numel // self.ranks.size)

    @property
    def dense_bytes(self) -> int:
        """Bytes that this rank would send for a dense average (ring model)."""
        once = self.segment_numel * (self.ranks.size - 1) * self.dense_itemsize
        return 2 * once if self.keeps_all else once

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in buffer order."""
        return [slot.name for slot in self.layout.slots]

    def within(self, segment: int, slot: int) -> slice:
        """Return a tensor's slice within a segment, counted from the segment's beginning."""
        first, one = segment * self.segment_numel, self.layout.slots[slot]
        start, stop = (
            min(max(place - first, 0), self.segment_numel) for place in (one.offset, one.stop)
        )
        return slice(start, stop)

    def views(self, full: Tensor) -> dict[str, Tensor]:
        """Return each tensor by name, in its shape, as a view of `full`, (numel,) or longer."""
        slots = self.layout.slots
        return {slot.name: full[slot.offset : slot.stop].view(slot.shape) for slot in slots}


class Compressor(ABC):
    """A way to make gradients smaller before they travel: settings without state."""

    @property
    def freezes_variance(self) -> bool:
        """Whether Adam's second moment is frozen once a warm-up is over.

        Such a compressor is for gradients that Adam uses, and for nothing else.
        """
        return False

    @property
    def keeps(self) -> bool:
        """Whether exchanges keep values for later averages, as many as there are parameters."""
        return True

    @abstractmethod
    def exchange(self, buffer: FlatBuffer) -> "Exchange":
        """Return the exchange that averages `buffer`, with its state."""


class Turn(NamedTuple):
    """The step and segment in which values are encoded.

    Attributes:
        step: Number of times that the buffer was averaged before.
        seed: Seed of random numbers: another one for each rank, buffer, segment and step, and the
            same ones from run to run.
        num_summed: Number of ranks whose values have been added up: 1 for those of one rank.
    """

    step: int
    seed: int
    num_summed: int = 1


@dataclass
class Tally:
    """What compression has saved on this rank (ring model).

    Attributes:
        raw_bytes: Bytes that it would have sent uncompressed.
        sent_bytes: Bytes that it has sent.
    """

    raw_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Uncompressed bytes divided by sent bytes; 1 where nothing was sent."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.raw_bytes + other.raw_bytes, self.sent_bytes + other.sent_bytes)


def if_sound(sound: Tensor, values: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return `values` if the bool scalar `sound` is true, else `otherwise`; no host waits."""
    if sound.device.type != "cpu":
        return torch.where(sound, values, 0.0 if otherwise is None else otherwise)
    if sound:
        return values
    return torch.zeros_like(values) if otherwise is None else otherwise


def scale_up(values: Tensor, scale: Tensor | None) -> None:
    """Multiply values with a loss scale, in place; a scale greater than float16 has is kept."""
    if scale is None:
        return
    if values.itemsize < scale.itemsize:  # a GPU would make the scale as narrow as the values
        values.copy_(values.to(scale.dtype).mul_(scale))
    else:
        values.mul_(scale)


class Exchange(ABC):
    """Averages one buffer again and again, with loss.

    Args:
        buffer: The buffer; its ranks make an exchange each.

    Attributes:
        step: Number of times that the buffer has been averaged.
        keeps_momentum: Whether the sent values are summed over steps, so that micro-batches must
            be added up before.
        freezes_variance: Whether Adam's second moment is frozen once a warm-up is over.
        froze_variance: Whether the warm-up was over at the last average.
        variance_steps: Adam's own steps that a tensor needs before its second moment is frozen.
        sends_momentum: Whether Adam's momentum travels after the warm-up.
        momentum_factors: Factor of momentum, where momentum is kept, by tensor of the buffer.
        fills_variance: Whether a value that had no gradient in the warm-up is given the others'
            second moment; else it is left alone, since no value decodes to zero.
        update_limit: Greatest change of a value in a step after the warm-up, in learning rates.
        keeps: Whether something of the values is kept for later averages.
        sends_twice: Whether the second half sends over the same ranks as the first.
        clips_by: What the values are clipped by before anything of them is kept: a factor, of shape
            () and 1 at most, or the greatest magnitude; None for not at all.
        was_dense: Whether the last average was uncompressed, of values that were not clipped.
    """

    keeps_momentum = False
    freezes_variance = False
    froze_variance = False
    variance_steps = 1
    sends_momentum = False
    fills_variance = False
    update_limit = 1.0
    keeps = False
    sends_twice = True
    clips_by: Tensor | float | None = None
    was_dense = False

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self.step = 0
        self.tally = Tally()
        self.momentum_factors = [0.0] * len(buffer.layout.slots)

    def passes(self, values: Tensor, used: Sequence[bool] | None = None) -> bool:
        """Whether the caller has to average `values` itself, uncompressed, as in a warm-up.

        Each rank must call before each `begin`, with the same; True takes the place of `begin`.
        """
        return False

    @abstractmethod
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        """Start averaging; each rank must call.

        Args:
            values: Shape (numel,), any floating type; not needed any more on return.
            out: Tensor for the average, of shape (numel,), or (segment_numel,) for this rank's own
                segment. May lie in `values`.
            used: By tensor of the buffer, whether this rank has values for it; None for all.
                Nothing is sent for a tensor that no rank has values for, and its state stays.
        """

    @abstractmethod
    def proceed(self) -> None:
        """Start the second half, once; each rank must call before `wait`, or `wait` does it."""

    @abstractmethod
    def wait(self) -> None:
        """Return once `out` holds the average; each rank must call."""

    def common_state(self) -> State:
        """Return what further steps depend on that is the same on all ranks; no communication."""
        return {}

    def own_state(self) -> State:
        """Return what this rank alone keeps, by kind and tensor name, without communication."""
        return {}

    def load_own(self, own: Mapping[str, Mapping[str, Tensor]]) -> None:  # noqa: B027
        """Take over what `own_state` has returned on this rank of as many, after `load`."""

    @property
    def kept(self) -> list[Tensor]:
        """Tensors that are held between two averages."""
        return []

    @abstractmethod
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take over a state of any number of ranks; names that are not here are passed over."""

    def _clip(self, values: Tensor) -> None:
        """Clip values without a loss scale, in place."""
        if isinstance(self.clips_by, Tensor):
            values.mul_(self.clips_by.clamp(max=1.0))
        elif self.clips_by is not None:
            values.clamp_(-self.clips_by, self.clips_by)

    def _pass(self) -> None:
        """Count an average that the caller makes, uncompressed."""
        self.froze_variance = False
        self._count(self.buffer.dense_bytes)
        self.step += 1

    def _count(self, sent_bytes: int) -> None:
        self.tally.raw_bytes += self.buffer.dense_bytes
        self.tally.sent_bytes += sent_bytes


class StepBytes:
    """Counts the bytes that a rank sends for training steps, and would send without codecs.

    Counted are all of training_step, backward and the optimizer's step. Set-up, validation,
    checkpoints and the last round of a fit are not. Dense, gradients would be sent in the format
    that the strategy gives them, and all else as it is.

    Args:
        sent: Returns all bytes that this rank has sent so far.
        codecs: Returns the bytes of these that codecs have sent, and would have sent dense.
    """

    def __init__(self, sent: Callable[[], int], codecs: Callable[[], Tally]) -> None:
        self._sent, self._codecs = sent, codecs
        self._is_counting = False
        self.tally = Tally()  # of all steps so far

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes that are sent inside; nested entries count once."""
        if self._is_counting:
            yield
            return
        self._is_counting, sent, codecs = True, self._sent(), self._codecs()
        try:
            yield
        finally:
            self._is_counting = False
            sent, now = self._sent() - sent, self._codecs()
            saved = (now.raw_bytes - codecs.raw_bytes) - (now.sent_bytes - codecs.sent_bytes)
            self.tally += Tally(raw_bytes=sent + saved, sent_bytes=sent)


def total_bytes(traffics: Iterator[Traffic]) -> int:
    """Return the sum of the counters' bytes, each counter counted once."""
    return sum({id(one): one.total_bytes for one in traffics}.values())
