"""A model that is split twice: each stage of a pipeline has parts of its layers on several ranks.

whole ──tensor parallel──> this rank's part of every layer ──pipeline──> of its stages' layers
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.tensor_parallel.split import SplitModel


class CombinedSplit:
    """Both splits as one.

    Args:
        tensor: Made first, of the full model.
        pipeline: Made of what that has left.

    Attributes:
        full_shapes: The full shape of each parameter that is a part here, or not here.
    """

    def __init__(self, tensor: SplitModel, pipeline: PipelineSplit) -> None:
        self._tensor, self._pipeline = tensor, pipeline
        self.full_shapes: Mapping[nn.Parameter, torch.Size] = {
            **pipeline.full_shapes,
            **tensor.full_shapes,
        }

    @property
    def groups(self) -> Sequence[Collectives]:
        """The ranks of a layer, and those of the pipeline."""
        return (*self._tensor.groups, *self._pipeline.groups)

    @property
    def groups_of_layers(self) -> Sequence[Collectives]:
        """The pipeline's ranks."""
        return self._pipeline.groups_of_layers

    @property
    def group_sets(self) -> Sequence[Sequence[Collectives]]:
        """Every set of groups that a parameter can be spread over."""
        return [
            (*inner, *outer)
            for inner in self._tensor.group_sets
            for outer in self._pipeline.group_sets
        ]

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of both."""
        return self._tensor.is_first and self._pipeline.is_first

    def groups_of(self, param: nn.Parameter) -> Sequence[Collectives]:
        """Return the groups over whose ranks the elements of `param` are spread."""
        return (*self._tensor.groups_of(param), *self._pipeline.groups_of(param))

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether a stage of this rank has `param`."""
        return self._pipeline.is_here(param)

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter."""
        return self.full_shapes.get(param, param.shape)

    def is_spread(self, param: nn.Parameter) -> bool:
        """Whether a parameter is on other ranks, or in part."""
        return self._pipeline.is_spread(param) or self._tensor.is_spread(param)

    def is_shared(self, param: nn.Parameter) -> bool:
        """Whether several ranks of the pipeline have a parameter."""
        return self._pipeline.is_shared(param)

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank's stage is the first that has `param`."""
        return self._pipeline.counts(param)

    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a full tensor; each rank must call."""
        return self._tensor.full(param, self._pipeline.full(param, local))

    def local(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        return self._tensor.local(param, full)
