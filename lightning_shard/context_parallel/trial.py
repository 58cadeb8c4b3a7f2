"""A trial of whether a block computes the same of a sequence in parts: on copies of real arguments.

    full     hidden ──> block ──> result, gradients of arguments and parameters
    parts     hidden ──cut──> block ──gather──> the same, of the parameters the mean over the ranks

What has no rule is computed on the gathered sequence, so both are equal unless a block looks at
something that no tensor tells, or a rule is wrong. The first call of each class of blocks is tried,
in evaluation mode so that nothing is dropped, and leaves the block as it was. It holds the
activations of one block for the full sequence, once.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.recomputation import CACHES, RECOMPUTED
from lightning_shard.data_parallel.recomputed_state import attributes_kept
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the largest value
_TOLERANCE_OF_HALVES = 5e-2
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Cut = Callable[[tuple[Any, ...], dict[str, Any]], Arguments | None]


def try_block(
    name: str, block: nn.Module, arguments: Arguments, cut: Cut, group: Collectives
) -> None:
    """Call a block with full sequences and with parts, and compare; each rank must call.

    Args:
        name: Path of the block in the model.
        block: The block, whose parameters are here.
        arguments: What it is called with.
        cut: Cuts the sequence in arguments.
        group: Group of the ranks that share a sequence.

    Raises:
        ConfigError: A result or a gradient differs; raised on every rank.
    """
    params = [param for param in block.parameters() if param.requires_grad]
    names = [one for one, param in block.named_parameters() if param.requires_grad]
    with _as_it_was(block):
        full = _Called(block, arguments, None, params)
    with _as_it_was(block):
        parts = _Called(block, arguments, cut, params)
    parts.average(len(params), group)
    found = _first_difference(full, parts, names)
    differences = [one for one in group.all_gather_object(found) if one is not None]
    if differences:
        raise ConfigError(
            f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) computes something "
            f"else of a sequence in {group.size} parts than of the full one: {differences[0]}. "
            f"Expected equal results, so nothing was trained. Use strategy='zero3' with "
            f"activation_checkpointing='full', or tensor_parallel with sequence_parallel=True; "
            f"please report the block's forward."
        )


class _Called:
    """The result of a call on copies of the arguments, and its gradients."""

    def __init__(
        self, block: nn.Module, arguments: Arguments, cut: Cut | None, params: list[nn.Parameter]
    ) -> None:
        leaves: dict[int, Tensor] = {}
        args, kwargs = tree_map_only(object, lambda one: _copied(one, leaves), arguments)
        sources = [one for one in leaves.values() if one.requires_grad]
        if cut is not None:
            args, kwargs = cut(args, kwargs) or (args, kwargs)
        result = full_tensor(_own_forward(block)(*args, **kwargs))
        outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.results = [one.detach() for one in outputs]
        self.gradients = _gradients(outputs, [*sources, *params])
        self.num_sources = len(sources)

    def average(self, num_params: int, group: Collectives) -> None:
        """Take the mean over the ranks of the parameters' gradients, as the engine does."""
        for grad in self.gradients[len(self.gradients) - num_params :]:
            group.all_reduce(grad)
            grad.div_(group.size)


def _gradients(outputs: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    ends = [one for one in outputs if one.requires_grad]
    if not ends or not sources:
        return []
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(one.shape, generator=generator).to(one) for one in ends]
    found = torch.autograd.grad(ends, sources, starts, allow_unused=True, materialize_grads=True)
    return [full_tensor(one).contiguous().clone() for one in found]


def _first_difference(full: _Called, parts: _Called, names: list[str]) -> str | None:
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
            leaves[id(value)] = full_tensor(value).detach().requires_grad_(follows)
        return leaves[id(value)]
    if any(cls.__module__ == CACHES for cls in type(value).__mro__):
        return copy.deepcopy(value)
    return value


def _own_forward(block: nn.Module) -> Callable[..., Any]:
    """Return the forward that is not computed again in backward."""
    recomputed = vars(block).get(RECOMPUTED)
    set_on_block = vars(block).get("forward") if recomputed is None else recomputed.forward
    forward: Callable[..., Any] = set_on_block or type(block).forward.__get__(block)
    return forward


@contextmanager
def _as_it_was(block: nn.Module) -> Iterator[None]:
    """Call a block in evaluation mode inside, and leave all that it changes as it was."""
    modes = [(one, one.training) for one in block.modules()]
    buffers = [(one, one.detach().clone()) for one in block.buffers()]
    devices = sorted({one.device.index or 0 for one in block.parameters() if one.is_cuda})
    block.eval()
    try:
        with torch.random.fork_rng(devices=devices), attributes_kept(block):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
