"""A module called twice on copies of the same arguments, and the first difference between the two.

    arguments ──copies──> call ──> results, gradients of arguments and parameters
                             └──── another way to call ──> the same?

What splits a module tries it out so before it is believed: gradients of a random direction are
compared, too. What differs by more than rounding in float32 is compared in float64.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.comparing import apart, largest
from lightning_shard.core.modules import gpus_of, random_streams_kept
from lightning_shard.data_parallel.differentiation import asking_nobody
from lightning_shard.data_parallel.recompute.checkpointed_blocks import without_reentrance
from lightning_shard.data_parallel.recompute.recomputation import CACHES
from lightning_shard.data_parallel.recompute.recomputed_state import attributes_kept
from lightning_shard.data_parallel.torch_private import without_saving_hooks
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the largest value
_TOLERANCE_OF_HALVES = 5e-2
_ROUNDING = 1e-3  # of the tolerance: how far values may be apart in doubt, of the largest of all
_TIMES_ROUNDED = 16  # times what a format has changed, where a module computes in it all the same
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Called:
    """The result of a call on copies of the arguments, as float64 with `double`, and its gradients.

    Attributes:
        results: The tensors that it returns.
        gradients: Those of the arguments' tensors, then those of `params`.
        num_sources: Number of the former.
    """

    def __init__(
        self,
        call: Callable[[Arguments], Any],
        arguments: Arguments,
        params: Sequence[Tensor],
        *,
        double: bool = False,
    ) -> None:
        leaves: dict[int, Tensor] = {}
        copies = tree_map_only(object, lambda one: _copied(one, leaves, double), arguments)
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


def first_difference(
    full: Called,
    parts: Called,
    names: Sequence[str],
    *,
    rounded: Called | None = None,
    rounding: float = 0.0,
) -> str | None:
    """Return as text where two calls differ first; None where they are equal."""
    if len(full.results) != len(parts.results):
        return f"it returns {len(parts.results)} tensors, not {len(full.results)}"
    kinds = [f"result {index}" for index in range(len(full.results))]
    kinds += [f"the gradient of argument {index}" for index in range(full.num_sources)]
    kinds += [f"the gradient of {name!r}" for name in names]
    expected, got = full.results + full.gradients, parts.results + parts.gradients
    before = expected if rounded is None else rounded.results + rounded.gradients
    scales = [largest(full.results)] * len(full.results)
    scales += [largest(full.gradients)] * len(full.gradients)
    for kind, one, other, known, most in zip(kinds, expected, got, before, scales, strict=False):
        if one.shape != other.shape:
            return f"{kind} has shape {tuple(other.shape)}, not {tuple(one.shape)}"
        scale, difference, tolerance = largest([one]), apart(other, one), _tolerance(one)
        lost = _TIMES_ROUNDED * apart(known, one) if _tolerance(known) < 1e-2 else 0.0
        allowed = max(tolerance * scale, tolerance * rounding * most, lost)
        if not difference <= allowed < math.inf or not other.isfinite().all():
            return f"{kind} differs by {difference:.3g}, of at most {scale:.3g}"
    return None


def _tolerance(value: Tensor) -> float:
    if value.dtype != torch.float64 and torch.is_autocast_enabled(value.device.type):
        return _TOLERANCE_OF_HALVES
    return _TOLERANCE.get(value.dtype, _TOLERANCE_OF_HALVES)


def refuse_difference(
    group: Collectives,
    compared: Callable[[bool], tuple[Called, Called]],
    names: Sequence[str],
    told: Callable[[str], str],
) -> None:
    """Raise a ConfigError, whose text `told` makes, where a call in parts differs on some rank.

    `compared` returns the call that is right and that in parts, in float64 where it is given True;
    each rank must call.
    """
    full, parts = compared(False)
    found = first_difference(full, parts, names)
    if any(one is not None for one in group.all_gather_object(found)):
        try:
            exact, parts_of_it = compared(True)
        except Exception as error:  # most compute in a format of their own, and say so anyhow
            found = first_difference(full, parts, names, rounding=10 * _ROUNDING)
            found = found and f"{found} (in float64 it raises {type(error).__name__}: {error})"
        else:
            found = first_difference(exact, parts_of_it, names, rounded=full, rounding=_ROUNDING)
    for one in group.all_gather_object(found):
        if one is not None:
            raise ConfigError(told(one))


@contextmanager
def in_double(module: nn.Module, *, double: bool = True) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let a module compute in float64 inside, with copies; yield what returns one's copy."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if not (double and tensor.is_floating_point()):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().double().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    held = [vars(one)[kind] for one in module.modules() for kind in ("_parameters", "_buffers")]
    with ExitStack() as places:
        for own in held:
            tensors = {name: copied(one) for name, one in own.items() if one is not None}
            places.enter_context(patch.dict(own, tensors))
        yield copied


def _copied(value: Any, leaves: dict[int, Tensor], double: bool) -> Any:
    """Return an argument that a call may change: tensors as leaves, caches copied."""
    if isinstance(value, Tensor):
        if id(value) not in leaves:
            follows = value.requires_grad and torch.is_grad_enabled()
            full = full_tensor(value).detach()
            made = full.double() if double and full.is_floating_point() else full.clone()
            leaves[id(value)] = made.requires_grad_(follows)
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
    block.eval()
    try:
        with (
            random_streams_kept(gpus_of(block)),
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
        for buffer, before in kept:
            buffer.data.copy_(before)  # autograd may have saved it, and sees no change


@contextmanager
def explained(told: Callable[[str], str]) -> Iterator[None]:
    """Turn errors inside that are none of ours into a ConfigError, whose text `told` makes."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        raise ConfigError(told(f"{type(error).__name__}: {error}")) from error
