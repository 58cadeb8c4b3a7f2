"""A module called twice on copies of the same arguments, and the first difference between the two.

    arguments ──copies──> call ──> results, gradients of arguments and parameters
                             └──── another way to call ──> the same?

What splits a module tries it out so before it is believed: gradients of a random direction are
compared, too, since a loss may be right where they are not.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.data_parallel.differentiation import asking_nobody
from lightning_shard.data_parallel.recomputation import CACHES
from lightning_shard.data_parallel.recomputed_state import attributes_kept
from lightning_shard.data_parallel.reentrance import without_reentrance
from lightning_shard.data_parallel.torch_private import without_saving_hooks
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the largest value
_TOLERANCE_OF_HALVES = 5e-2
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Called:
    """The result of a call on copies of the arguments, and its gradients.

    Args:
        call: Does the call.
        arguments: What it is called with.
        params: Tensors beside the arguments of which gradients are taken.

    Attributes:
        results: The tensors that it returns.
        gradients: Those of the arguments' tensors, then those of `params`.
        num_sources: Number of the former.
    """

    def __init__(
        self, call: Callable[[Arguments], Any], arguments: Arguments, params: Sequence[Tensor]
    ) -> None:
        leaves: dict[int, Tensor] = {}
        copies = tree_map_only(object, lambda one: _copied(one, leaves), arguments)
        sources = [one for one in leaves.values() if one.requires_grad]
        # a call may change in place what is no leaf
        usable = {id(one): one.clone() if one.requires_grad else one for one in leaves.values()}
        given = tree_map_only(Tensor, lambda one: usable[id(one)], copies)
        result = full_tensor(call(given))
        outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.results = [one.detach() for one in outputs]
        self.gradients = _gradients(outputs, [*sources, *params])
        self.num_sources = len(sources)

    @property
    def of_params(self) -> list[Tensor]:
        """The gradients of the parameters."""
        return self.gradients[self.num_sources :]


def _gradients(outputs: list[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    ends = [one for one in outputs if one.requires_grad]
    if not ends or not sources:
        return []
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(one.shape, generator=generator).to(one) for one in ends]
    with asking_nobody():
        found = torch.autograd.grad(
            ends, sources, starts, allow_unused=True, materialize_grads=True
        )
    return [full_tensor(one).contiguous().clone() for one in found]


def first_difference(full: Called, parts: Called, names: Sequence[str]) -> str | None:
    """Return as text where two calls differ first; None where they are equal.

    Args:
        full: The call that is right.
        parts: The other one.
        names: Name of each of the parameters.
    """
    if len(full.results) != len(parts.results):
        return f"it returns {len(parts.results)} tensors, not {len(full.results)}"
    kinds = [f"result {index}" for index in range(len(full.results))]
    kinds += [f"the gradient of argument {index}" for index in range(full.num_sources)]
    kinds += [f"the gradient of {name!r}" for name in names]
    expected, got = full.results + full.gradients, parts.results + parts.gradients
    for kind, one, other in zip(kinds, expected, got, strict=False):
        if one.shape != other.shape:
            return f"{kind} has shape {tuple(other.shape)}, not {tuple(one.shape)}"
        scale = one.abs().amax().item() if one.numel() else 0.0
        difference = (one.double() - other.double()).abs().amax().item() if one.numel() else 0.0
        tolerance = _TOLERANCE.get(one.dtype, _TOLERANCE_OF_HALVES)
        if torch.is_autocast_enabled(one.device.type):
            tolerance = _TOLERANCE_OF_HALVES
        if not difference <= max(tolerance * scale, tolerance * 1e-3):
            return f"{kind} differs by {difference:.3g}, of at most {scale:.3g}"
    return None


def _copied(value: Any, leaves: dict[int, Tensor]) -> Any:
    """Return an argument that a call may change: tensors as leaves, caches copied."""
    if isinstance(value, Tensor):
        if id(value) not in leaves:
            follows = value.requires_grad and torch.is_grad_enabled()
            leaves[id(value)] = full_tensor(value).detach().clone().requires_grad_(follows)
        return leaves[id(value)]
    if any(cls.__module__ == CACHES for cls in type(value).__mro__):
        with _Detached():
            return copy.deepcopy(value)
    return value


class _Detached(TorchFunctionMode):
    """Lets tensors inside of what is copied be results of operations, as other blocks' keys are."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), full_tensor(tensor).detach().clone())


@contextmanager
def as_it_was(block: nn.Module) -> Iterator[None]:
    """Call a block in evaluation mode inside, and leave all that it changes as it was.

    A checkpoint of activations around the block does not hear of what is saved here.
    """
    modes = [(one, one.training) for one in block.modules()]
    devices = sorted({one.device.index or 0 for one in block.parameters() if one.is_cuda})
    block.eval()
    try:
        with (
            torch.random.fork_rng(devices=devices),
            unchanged(block),
            without_reentrance(),
            without_saving_hooks(),
        ):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Leave attributes and buffers of a module inside as they are."""
    with attributes_kept(module), buffers_kept(module):
        yield


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Undo what is done inside to a module's buffers, such as running statistics."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextmanager
def explained(told: Callable[[str], str]) -> Iterator[None]:
    """Turn errors inside that are none of ours into a ConfigError.

    Args:
        told: Makes its text of the kind and the text of an error.
    """
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        raise ConfigError(told(f"{type(error).__name__}: {error}")) from error
