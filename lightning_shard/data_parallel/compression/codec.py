"""A codec encodes values in fewer bytes and decodes them: all that a new compression needs.

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

from lightning_shard.data_parallel.compression.compressor import (
    Compressor,
    Exchange,
    FlatBuffer,
    Turn,
)
from lightning_shard.data_parallel.compression.exchange import CodecExchange


class Codec(Compressor):
    """Makes values smaller by itself, one rank's segment at a time.

    Attributes:
        error_feedback: Whether the values that encoding has lost are kept and added the next time
            (arXiv:1809.07599).
        momentum: Factor of the momentum m that is added up before sending, m = momentum * m + g
            (arXiv:1712.01887); the optimizer must then have none. 0 for no momentum.
        sends_momentum: Whether Adam's momentum travels, an average over steps with the optimizer's
            factor, and Adam's second moment is frozen after the warm-up.
        update_limit: Greatest change of a value in a step under a frozen second moment, in
            learning rates.
        is_sparse: Whether most values decode to zero. With error feedback, momentum then starts
            anew where a value was sent. Adam's momentum under other codecs goes on from the
            average of all ranks', where each rank gets it (stage 0).
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
            values: Shape (n,), float32, finite; must not be changed.
            turn: The step, the random seed and the number of summed ranks.

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
