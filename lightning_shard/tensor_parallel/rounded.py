"""Linear layers that compute with a rounded weight by a forward of their own.

    rounds as it multiplies    torchao's Float8Linear: the weight is a plain matrix; known by a
                               trial, whose product is that of the matrix but for rounding
    packed                     bitsandbytes' Linear4bit: two elements of a row in a byte, and a
                               scale for so many elements, which follow each other in its rows

                    rank 0       rank 1                  rank 0 has of elements and scales
    colwise   row 0 [ s0 | s1 ]                          the first half
              row 1              [ s2 | s3 ]
    rowwise   row 0 [ s0 |         s1 ]                  the first half of each row
              row 1 [ s2 |         s3 ]

A packed weight is cut between the blocks of its scales, or left full. Scales that are quantised
themselves are not while it is cut: they would be cut between their own blocks.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard.core.states import setting
from lightning_shard.tensor_parallel.sharding import Sharding
from lightning_shard.tensor_parallel.styles import ParameterCut

_LEAST, _MOST = 1e-3, 0.2  # of the product: what rounding to four to eight bits changes
_ROWS, _COLUMNS = 32, 64


def rounds_product(module: nn.Module) -> bool:
    """Whether a layer multiplies by its weight, and rounds both: it is tried out on another."""
    weight = module._parameters.get("weight")
    own: Any = getattr(type(module), "forward", None)
    if not isinstance(module, nn.Linear) or own is nn.Linear.forward or weight is None:
        return False
    if weight.ndim != 2 or not weight.is_floating_point():
        return False
    stream = torch.Generator().manual_seed(5)
    device = "cpu" if weight.is_meta else weight.device
    matrix, x = (
        torch.randn(_ROWS, _COLUMNS, generator=stream).to(device, weight.dtype) for _ in range(2)
    )
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(matrix), "bias": None}
    try:
        with torch.no_grad():
            got, expected = own(tried, x).float(), F.linear(x, matrix).float()
    except Exception:  # its forward may raise whatever it likes
        return False
    if got.shape != expected.shape:
        return False
    error = float((got - expected).norm() / expected.norm())
    return _LEAST < error < _MOST


def is_packed(weight: Any) -> bool:
    """Whether a weight is packed in rows, with a scale for each block of elements."""
    state: Any = getattr(weight, "quant_state", None)
    known = all(hasattr(state, name) for name in ("absmax", "blocksize", "shape", "nested"))
    return known and len(state.shape) == 2


def is_packed_linear(module: nn.Module) -> bool:
    """Whether a linear layer has a packed weight of its outputs and inputs."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or not is_packed(weight):
        return False
    state: Any = weight.quant_state  # type: ignore[union-attr]
    return tuple(state.shape) == (module.out_features, module.in_features)


def is_rounded(module: nn.Module) -> bool:
    """Whether a linear layer computes with a rounded weight, of whichever kind."""
    return is_packed_linear(module) or rounds_product(module)


def shape_of(param: Any) -> torch.Size:
    """Return the shape of a weight as it is multiplied by."""
    return torch.Size(param.quant_state.shape) if is_packed(param) else param.shape


def are_between_blocks(param: Any, cut: ParameterCut, num_ranks: int) -> bool:
    """Whether a packed weight can be cut so between the blocks of its scales."""
    rows, columns = param.quant_state.shape
    run: int = columns if cut.dim == 1 else rows // cut.num_blocks * columns
    size: int = param.quant_state.blocksize
    return run % (num_ranks * size) == 0


def packed_sharding(packed: Tensor, rows: int, cut: ParameterCut, num_ranks: int) -> Sharding:
    """Return how elements or scales are cut that lie one after the other in rows."""
    num_blocks = rows if cut.dim == 1 else cut.num_blocks
    blocks = (packed.shape[0] // num_blocks,) * num_blocks
    return Sharding(dim=0, blocks=blocks, num_shards=num_ranks)


def cut_scales(state: Any, cut: ParameterCut, rank: int, num_ranks: int) -> Any:
    """Return a rank's part of what a packed weight's elements mean."""
    part, shape = copy.copy(state), list(state.shape)
    scales = _plain_scales(state)
    part.absmax = packed_sharding(scales, shape[0], cut, num_ranks).shard(scales, rank)
    shape[cut.dim] //= num_ranks
    part.shape, part.nested, part.state2, part.offset = torch.Size(shape), False, None, None
    return part


def has_scales(weight: Any, scales: Any) -> AbstractContextManager[object]:
    """Inside, a packed weight has these scales; None leaves it its own."""
    return nullcontext() if scales is None else setting(weight, quant_state=scales)


def _plain_scales(state: Any) -> Tensor:
    """Return the scales of a packed weight in float32, one for each block."""
    if not state.nested:
        scales: Tensor = state.absmax
        return scales
    inner = state.state2
    steps = inner.absmax.repeat_interleave(inner.blocksize)[: state.absmax.numel()]
    found: Tensor = inner.code[state.absmax.long()] * steps + state.offset
    return found


def unrounded(module: nn.Module) -> None:
    """Let a copied layer that rounds be a plain one, whose weight has any elements."""
    if is_packed_linear(module):
        module._parameters["weight"] = nn.Parameter(
            torch.empty(shape_of(module._parameters["weight"]))
        )
    elif not rounds_product(module):
        return
    module.__class__ = nn.Linear


def product_without_bias(module: Any, forward: Any, x: Tensor) -> Tensor:
    """Return what a layer's own forward makes of an input without the bias."""
    with patch.dict(module.__dict__["_parameters"], bias=None):
        result: Tensor = forward(x)
    return result
