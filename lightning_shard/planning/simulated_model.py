"""The model of a simulated pipeline: its layers split and its stages cut, as on a real rank.

module ──stand-ins──> split layers ──> stages         shared by the ranks: without elements
           │              tp             pp           nothing has to be left out
           └ no elements
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar, cast

import lightning_utilities.core.apply_func as apply_func
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.mesh import Axis
from lightning_shard.data_parallel.memory.inner_tensors import take_apart, with_changed
from lightning_shard.data_parallel.memory.quantised import is_quantised
from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.data_parallel.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
)
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.partition import Stages, parameter_stages
from lightning_shard.pipeline_parallel.staged_model import StagedModel
from lightning_shard.planning.description import Simulated, WorldOptions
from lightning_shard.tensor_parallel.trial import explained

# Modules and batches without elements.
#
# The stand-ins are torch's fake tensors: they know shape, format, device and which storage they
# share, and take neither memory nor arithmetic. They stand on the CPU, where attention saves as
# little for backward as it does on GPUs.

M = TypeVar("M", bound=nn.Module)


def copied_with(
    stand_in: Callable[[Tensor], Tensor], module: M, left_out: Iterable[object] = ()
) -> M:
    """Copy a module with other tensors for its parameters and buffers; ties stay ties."""
    memo: dict[int, Any] = {id(one): None for one in left_out}
    for param in module.parameters():
        made = with_changed(param, stand_in)
        memo[id(param)] = nn.Parameter(made, requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = stand_in(buffer)
    copied = copy.deepcopy(module, memo)
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if isinstance(layer, nn.Linear) and weight is not None and is_quantised(weight):
            without_elements: Any = copied.get_submodule(name)
            without_elements.forward = partial(_quantised_product, without_elements)
    return copied


class _Product(torch.autograd.Function):
    """A product with a weight that is unpacked for it, in backward once more: it saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ grads[0].new_empty(ctx.shape), None


def _quantised_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute as a layer of bitsandbytes does, which looks at elements and scales."""
    shape = layer.out_features, layer.in_features
    product: Tensor = _Product.apply(x, shape)  # type: ignore[no-untyped-call]
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


class NoElements:
    """Makes stand-ins that take part in one computation."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a stand-in of the same shape and strides, of format `dtype` if it is real."""
        kind = dtype if dtype is not None and like.is_floating_point() else like.dtype
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=kind, device="cpu")

    def batch(self, batch: Any) -> Any:
        """Return a batch to compute with; tensors that have elements stay as they are.

        Whole numbers on meta become zeros, which are indices in any range: code may read them.
        """

        def present(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor.cpu()
            if tensor.is_floating_point() or tensor.is_complex():
                return self.tensor(tensor)
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

        return apply_func.apply_to_collection(batch, Tensor, present)

    def module(
        self, module: M, *, dtype: torch.dtype | None = None, left_out: Iterable[object] = ()
    ) -> M:
        """Copy a module with stand-ins for its parameters and buffers; ties stay ties.

        Real ones get the format `dtype`; None leaves each its own. Parameters that are made of
        several tensors are taken apart, as in a run. The copy does not refer to `left_out`.
        """
        copied = copied_with(lambda one: self.tensor(one, dtype), module, left_out)
        take_apart(copied)
        return copied


# A simulated group with one rank, which counts what the rank would send, and sends nothing.
#
#     engine, layers, stages ──> SimulatedCollectives ──> Traffic
#                                                           (no process group, no peers)
#
# The code that trains calls it as it calls any group, so the counts are those of a real run.

T = TypeVar("T")


class SimulatedCollectives(Collectives):
    """Rank `rank` of `size` ranks that all do what this one does.

    Receiving leaves a tensor as it is: the tensors must have no elements.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.group = cast("dist.ProcessGroup", None)
        self.rank, self.size = rank, size
        self.traffic = Traffic()

    def duplicate(self, timeout: timedelta | None = None) -> Self:
        """Return this group, in which no operation is ever in flight."""
        return self

    def beside(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Self:
        """Return a group of as many ranks, the first of which is this one."""
        return type(self)(0, len(ranks))

    def barrier(self) -> None:
        """Return at once."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Return a list with the object once for each rank."""
        return [obj] * self.size

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object itself, whichever rank is the source."""
        return obj

    def _start_nothing(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    _all_reduce = _reduce_scatter = _all_gather = cast(Any, _start_nothing)
    _all_to_all = _broadcast = cast(Any, _start_nothing)

    def send_all(self, tensors: Sequence[Tensor]) -> None:
        """Count one message for each tensor."""
        for tensor in tensors:
            self.traffic.count("send", tensor.numel(), tensor.itemsize)


class SimulatedModel:
    """A model without elements, changed for the first rank of the group along each axis."""

    def __init__(self, module: nn.Module, options: WorldOptions) -> None:
        self.module, self.options = module, options
        self._recomputing = checkpointed_blocks(  # which the module is for good
            module,
            options.engine.activation_checkpointing,
            options.engine.units,
            reads_buffers=False,
        )
        self._recomputing.__enter__()
        sharing = [one for one in options.dimensions if options.mesh.size(one.axis) > 1]
        self.groups: dict[Axis, SimulatedCollectives] = {
            one.axis: SimulatedCollectives(0, options.mesh.size(one.axis)) for one in sharing
        }
        self._shares: Sequence[Simulated] = [
            one.simulated(module, options, self.groups[one.axis]) for one in sharing
        ]
        self.splits = [one.split for one in self._shares]
        self.parts = {param: param.data for param in module.parameters()}
        shapes = {param: part.shape for param, part in self.parts.items()}
        self.stages: Mapping[nn.Parameter, Stages] = dict.fromkeys(self.parts, (0,))
        self._staged: StagedModel | None = None
        if options.cut is not None:
            partition = options.cut(module)
            self.stages = parameter_stages(module, partition)
            self._staged = StagedModel(module, partition, self.stages, shapes, forget=self._forget)

    @property
    def staged(self) -> StagedModel:
        """The model cut into stages, for a model in a pipeline."""
        assert self._staged is not None
        return self._staged

    def _forget(self) -> None:
        for one in self._shares:
            one.forget()

    def step(self, microbatch: Microbatch) -> Any:
        """Run the user's step on a microbatch."""
        with explained(self._fails_without_elements):
            return self.options.step(self.module, microbatch.content)

    def _fails_without_elements(self, error: str) -> str:
        return (
            f"A dry run takes a step of {type(self.module).__name__} on tensors without "
            f"elements, which failed ({error}); expected a training_step that asks for the shapes "
            f"of tensors only, and needs no trainer."
        )


def loss_of(result: Any) -> Tensor:
    """Return the loss in a step's result."""
    found = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(found, Tensor) or not found.requires_grad:
        raise ConfigError(
            f"training_step returned {type(result).__name__} without a loss that requires a "
            f"gradient, expected one: a dry run goes through its backward."
        )
    return found


class WithoutElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with stand-ins at once, where torch would first ask each of them for its mode.

    Groups of matrices without elements are multiplied in any format, as torch does in bfloat16.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            if types and all(kind is FakeTensor for kind in types):
                return self._mode.dispatch(func, types, args, kwargs)
            return func(*args, **kwargs)
        left, right, *rest = args
        result = func(left.bfloat16(), right.bfloat16(), *rest, **kwargs)
        return result.to(left.dtype)
