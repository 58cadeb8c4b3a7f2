"""A codec makes a few numbers smaller and back; that is all that a new way of compressing needs.

    class Sign(Codec):
        error_feedback = True

        def encode(self, values, turn):
            return values.abs().mean()[None], values >= 0

        def decode(self, fields, numel):
            scale, positive = fields
            return torch.where(positive, scale, -scale)

It is then an option of the strategy: `ZeRO2Strategy(compression=Sign())`.
"""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from lightning_shard.data_parallel.compression.buffer import FlatBuffer
from lightning_shard.data_parallel.compression.compressor import Compressor, Exchange, Turn
from lightning_shard.data_parallel.compression.exchange import CodecExchange


class Codec(Compressor):
    """Makes values smaller by itself, one rank's segment at a time.

    Attributes:
        error_feedback: Keep what encoding has lost and add it the next time (arXiv:1809.07599).
        momentum: Factor of momentum m that is added up before sending, m = momentum * m + g
            (arXiv:1712.01887); then the optimizer must have none. 0: none.
        sends_momentum: Adam's momentum travels, an average over steps with the optimizer's factor,
            and after the warm-up its second moment is frozen.
        update_limit: Then the greatest change of a value in a step, in learning rates.
        is_sparse: Most values decode to zero. With error feedback, momentum starts anew where one
            was sent. Adam's under other codecs goes on from the average of all ranks', where each
            gets it (stage 0).
    """

    error_feedback: bool = False
    momentum: float = 0.0
    sends_momentum: bool = False
    update_limit: float = 1.0
    is_sparse: bool = False

    @property
    @override
    def freezes_variance(self) -> bool:
        return self.sends_momentum

    @abstractmethod
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        """Make `values` smaller.

        Args:
            values: Shape (n,), float32, finite. Not to be changed.
            turn: The step, and a seed.

        Returns:
            Tensors whose types and shapes depend on n, the step and `turn.num_summed` alone.
        """

    @abstractmethod
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        """Make values, shape (numel,), float32, of what `encode` returned."""

    def is_dense(self, step: int) -> bool:
        """Whether this step is a warm-up in which nothing is compressed."""
        return False

    @override
    def exchange(self, buffer: FlatBuffer) -> Exchange:
        return CodecExchange(self, buffer)
