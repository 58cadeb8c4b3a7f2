"""Values in blocks of one size, for codecs that have something in common for each block."""

from torch import Tensor
from torch.nn.functional import pad


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Cut into rows of `block` values, zeros behind the last: shape (n,) to (blocks, block)."""
    return pad(values, (0, -values.numel() % block)).view(-1, block)
