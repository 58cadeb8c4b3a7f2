"""Experts' weights look full, in a step, to all code but the experts' own forwards.

    in their forward     gate_up (E / W, 2 I, H)      this rank's experts
    in user code         gate_up (E, 2 I, H)          gathered where an operation needs elements
                         its gradient                 summed over the ranks, / W, own experts' taken

Each rank's loss may make something else of the full weights, so gradients of all ranks are summed;
the engine takes the mean over ranks, of which those that have an expert are W times fewer.
Gathering is collective: each rank must ask for the same weights, in one order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.core.placeholders import Placeholder, is_placeholder
from lightning_shard.data_parallel.torch_private import pass_for_parameter
from lightning_shard.data_parallel.views.sharded_parameter import bring_full
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.tensor_parallel.dim_sharded_operations import names_of_rules
from lightning_shard.tensor_parallel.dim_sharded_tensor import Part, showing, wrapped
from lightning_shard.tensor_parallel.full_view import WeightView, held
from lightning_shard.tensor_parallel.regions import (
    all_reduced,
    copy_to_region,
    gather_to_region,
    reduce_from_region,
    scale_gradient,
)

_WITHOUT_ELEMENTS = (
    "__get__ __set__ requires_grad_ retain_grad is_contiguous "
    "new_empty new_zeros new_ones new_full new_tensor"
)


_STANDS_IN = "_lightning_shard_stands_in"


def _needs_all(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Leave an operation to the full tensor."""
    return NotImplemented


@dataclass(frozen=True, kw_only=True)
class ExpertPart(Part):
    """One rank's experts' part of a weight; see the module.

    Attributes:
        anchor: A leaf without elements, to which gradients go where no element is here.
        in_pipeline: Whether backwards ask for the gradients of some tensors only.
    """

    own_rules: ClassVar[Mapping[str, Callable[..., Any]]] = dict.fromkeys(
        names_of_rules() - set(_WITHOUT_ELEMENTS.split()), _needs_all
    )

    param: nn.Parameter
    experts: ExpertSplit
    anchor: Tensor
    in_pipeline: bool

    @property
    @override
    def full_shape(self) -> Sequence[int]:
        return self.experts.full_shape(self.param)

    @override
    def gather(self) -> Tensor:
        if self.experts.is_batched(self.param):
            full = gather_to_region(self.local, 0, self.group)
        else:
            self._check_pipeline()
            full = copy_to_region(reduce_from_region(self._own_or_zeros(), self.group), self.group)
        return scale_gradient(full, 1 / self.group.size, self.group)

    def _check_pipeline(self) -> None:
        """Refuse a gradient that only the rank with the expert would take part in."""
        if self.in_pipeline and self.local.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"Rank {self.group.rank}: a step in a pipeline reads a weight of shape "
                f"{tuple(self.full_shape)} of an expert in a list, which one of "
                f"{self.group.size} ranks has; expected reading without gradients. Read "
                f"weight.detach(), or leave expert_parallel_size or pipeline_parallel_size out."
            )

    def _own_or_zeros(self) -> Tensor:
        if self.experts.is_here(self.param):
            return self.local
        zeros = self.local.new_zeros(self.full_shape)
        return zeros + self.anchor.sum().to(zeros) if self.local.requires_grad else zeros

    @override
    def gather_detached(self) -> Tensor:
        return self.experts.full(self.param, self.local.detach())

    @override
    def split(self, value: Tensor, dim: int) -> Tensor:
        return self._own(value)

    @override
    def narrow(self, value: Any) -> Any:
        return self._own(value) if isinstance(value, Tensor) else value

    @override
    def own_gradient(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._own(all_reduced(value, self.group) / self.group.size)

    def _own(self, full: Tensor) -> Tensor:
        if not self.experts.is_here(self.param):
            return full.new_empty(0)
        return self.experts.local(self.param, full)


class ExpertWeights:
    """Decides how experts' weights are seen."""

    def __init__(self, split: ExpertSplit, *, in_pipeline: bool = False) -> None:
        self._split, self._in_pipeline = split, in_pipeline
        self._is_in_step = False

    @contextmanager
    def step(self, *, in_hook: bool = False) -> Iterator[None]:
        """Show full weights inside, to code outside of the experts' forwards.

        With `in_hook` they are shown as they are, to a hook that the step calls, which sees them
        full.
        """
        before, self._is_in_step = self._is_in_step, not in_hook
        try:
            yield
        finally:
            self._is_in_step = before

    def look(self, param: nn.Parameter, tensor: Tensor, anchor: Tensor, *, at_once: bool) -> Tensor:
        """Return what looks full of a parameter, or of what stands for it, while a step runs.

        It is gathered `at_once`, or where an operation needs elements. Each backward has a gradient
        of `anchor`, a leaf without elements.
        """
        split = self._split
        shape = split.full_shape(param)
        if not self._is_in_step or self._is_full(param, tensor) or not bring_full(tensor):
            return tensor
        if is_placeholder(tensor):
            return Placeholder.of(tensor, shape, getattr(tensor, "origin", ""))
        part = ExpertPart(
            local=tensor,
            dim=0,
            group=split.group,
            param=param,
            experts=split,
            anchor=anchor,
            in_pipeline=self._in_pipeline,
        )
        if at_once:
            return part.gather()
        wide = wrapped(part)
        pass_for_parameter(wide)
        return showing(wide, tensor)

    def _is_full(self, param: nn.Parameter, tensor: Tensor) -> bool:
        """Whether a tensor, of a copy say, is what every rank has in full."""
        if self._split.is_batched(param):
            return tensor.shape == self._split.full_shape(param)
        return tensor is not param and not stands_in(tensor) and tensor.numel() > 0


class OwnForwards(Protocol):
    """The calls of a mixture; see `BatchedExperts` and `ListedExperts`."""

    anchor: Tensor
    is_own: bool


def standing_in(tensor: Tensor) -> Tensor:
    """Let a tensor be seen as the parameter in whose place it is put is seen."""
    vars(tensor)[_STANDS_IN] = True
    return tensor


def stands_in(tensor: Tensor) -> bool:
    """Whether a tensor has been put in the place of a parameter, as what is here of it."""
    return _STANDS_IN in vars(tensor)


@dataclass(frozen=True, kw_only=True)
class ExpertView:
    """How the weights of one module of an expert are seen."""

    weights: ExpertWeights
    names: Mapping[str, nn.Parameter]
    calls: OwnForwards
    inner: WeightView | None = None
    layer: str = ""

    def held(self, name: str, params: Mapping[str, Any]) -> Any:
        """Return what a module of an expert holds under a parameter's name."""
        return held(f"{self.layer}.{name}", params, "each rank has some of the experts")

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter as the code that reads it now sees it."""
        if name in self.names and not self.calls.is_own:
            at_once, anchor = self.inner is not None, self.calls.anchor
            tensor = self.weights.look(self.names[name], tensor, anchor, at_once=at_once)
        return tensor if self.inner is None else self.inner.of(name, tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertView":
        """Return this view: a copy of an expert is split as the expert is."""
        return self
