"""What the engine must know of a model that is split over other ranks as well.

Under tensor parallelism a parameter here is one rank's part of a whole one. The engine keeps the
parts in step with those of the ranks that hold the same part; saving, loading and the norm of the
gradient ask this for the rest.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives


class ModelSplit(Protocol):
    """How the parameters of this rank's model make up whole ones."""

    @property
    def group(self) -> Collectives | None:
        """Return the ranks that share the model, or None when no others do."""

    @property
    def full_shapes(self) -> Mapping[nn.Parameter, torch.Size]:
        """Return the whole shape of each parameter that is only a part here."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share the model."""

    def whole(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a whole tensor from parts shaped as `param`; each rank of the split must call."""

    def local(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor shaped as the whole of `param`; others as is."""

    def group_of(self, param: nn.Parameter) -> Collectives | None:
        """Return the ranks that hold the other parts of `param`, or None when it is whole here."""


class Unsplit:
    """A model of which every rank has all parameters."""

    group = None
    full_shapes: Mapping[nn.Parameter, torch.Size] = {}
    is_first = True

    def whole(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return the tensor."""
        return local

    def local(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """Return the tensor."""
        return whole

    def group_of(self, param: nn.Parameter) -> Collectives | None:
        """Return None."""
        return None
