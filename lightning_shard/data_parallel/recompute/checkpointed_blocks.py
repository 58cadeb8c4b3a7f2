"""Which blocks of a model are computed again in backward, and putting their forwards back.

    blocks.0  Block   forward of its class   ──entered──>   forward set on it ──left──> as before
    blocks.1  Block

A block's class, its names in a state dict and its hooks stay as they are.

Checkpoints of activations that are not reentrant, where gradients go to some leaves only, and what
those call that are.

A reentrant checkpoint runs a backward of its own within the backward, which torch allows only where
gradients go to every leaf; a stage of a pipeline, or a trial of a block, asks for those of some. So
there `torch.utils.checkpoint` keeps its checkpoints in the other way, and what is trained is the
same: nothing, where no tensor among a reentrant checkpoint's arguments asks for a gradient, and
nothing through tensors inside a list or a dictionary that it returns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils import checkpoint

from lightning_shard.core.states import having
from lightning_shard.data_parallel.options import ActivationCheckpointing
from lightning_shard.data_parallel.recompute.recomputation import RECOMPUTED, Recomputed, recomputes
from lightning_shard.data_parallel.recompute.recomputed_state import has_statistics
from lightning_shard.data_parallel.torch_private import COMPILED_MODULE, has_compiled_call
from lightning_shard.data_parallel.units.units import named_blocks
from lightning_shard.errors import ConfigError

Asks = Callable[[Tensor], bool]
"""Says whether an argument of a checkpoint asks for a gradient."""

_asks: ContextVar[Asks | None] = ContextVar("asks", default=None)  # where none is reentrant
_noted: ContextVar[Callable[[Any], object] | None] = ContextVar("noted", default=None)
_Reentrant: Any = checkpoint.CheckpointFunction


class _CheckpointFunction(_Reentrant):  # type: ignore[misc]
    """The function that `checkpoint` calls where it is to be reentrant."""

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Make a checkpoint that is not reentrant where none may be, else torch's own."""
        asks, note = _asks.get(), _noted.get()
        if asks is None:
            if note is not None and torch.is_grad_enabled():
                note(function)
            return _Reentrant.apply(function, preserve_rng_state, *args)
        if not any(asks(one) for one in args if isinstance(one, Tensor)):
            if torch.is_grad_enabled():
                checkpoint.check_backward_validity(args)  # which warns
            with torch.no_grad():
                return function(*args)
        result = checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        return tuple(map(_followed, result)) if isinstance(result, tuple) else _followed(result)


def _followed(result: Any) -> Any:
    """Return a result, or one of a tuple, without the graphs that a reentrant checkpoint drops."""
    is_tensor = isinstance(result, Tensor)
    return result if is_tensor else apply_to_collection(result, Tensor, Tensor.detach)


def requires_grad(tensor: Tensor) -> bool:
    """Say whether a tensor asks for a gradient where all tensors are known."""
    return tensor.requires_grad


def without_reentrance(asks: Asks = requires_grad) -> AbstractContextManager[object]:
    """Make no checkpoint of activations reentrant inside, whatever the user's code asks for.

    Args:
        asks: Says whether an argument of a checkpoint asks for a gradient.
    """
    return _at_checkpoints(_asks, asks)


def noting_reentrance(note: Callable[[Any], object]) -> AbstractContextManager[object]:
    """Call `note` inside with each function that a reentrant checkpoint calls in a forward."""
    return _at_checkpoints(_noted, note)


def _at_checkpoints(variable: ContextVar[Any], value: object) -> AbstractContextManager[object]:
    checkpoint.CheckpointFunction = _CheckpointFunction  # type: ignore[misc]
    return having(variable, value)


@contextmanager
def checkpointed_blocks(
    model: nn.Module,
    choice: ActivationCheckpointing | None,
    units: Sequence[str] | None = None,
    *,
    reads_buffers: bool = True,
) -> Iterator[None]:
    """Compute the activations of a model's blocks again in backward inside.

    Args:
        model: Module whose blocks are checkpointed.
        choice: "full" or "selective" for the model's blocks, or the class names of modules whose
            activations are all dropped; None does nothing.
        units: Class names of the blocks; None takes the repeated children of lists.
        reads_buffers: Whether buffers have elements, so that changes of them can be seen.

    Raises:
        ConfigError: The model has no such blocks.
    """
    blocks = [] if choice is None else list(_chosen(model, choice, units))
    before = [(block, vars(block).get("forward")) for _, block in blocks]
    kind = choice if isinstance(choice, str) else "full"
    try:
        for (name, block), (_, forward) in zip(blocks, before, strict=True):
            vars(block)[RECOMPUTED] = Recomputed(name, forward, is_checked=not reads_buffers)
            vars(block)["forward"] = recomputes(block, kind)
        yield
    finally:
        for block, forward in before:
            _put_back(block, forward)


def _put_back(block: nn.Module, forward: Any) -> None:
    vars(block).pop(RECOMPUTED, None)
    vars(block).pop("forward", None)
    if forward is not None:
        vars(block)["forward"] = forward


def _chosen(
    model: nn.Module, choice: ActivationCheckpointing, units: Sequence[str] | None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield by name the modules to checkpoint, each once; a compiled one without its wrapper."""
    option = "units" if isinstance(choice, str) else "activation_checkpointing"
    classes = units if isinstance(choice, str) else choice
    found = dict.fromkeys(_uncompiled(named_blocks(model, classes, option=option)))
    if not found:
        raise ConfigError(
            f"activation_checkpointing={choice!r} computes the activations of blocks again, but "
            f"{type(model).__name__} has no list of repeated modules (a ModuleList or Sequential); "
            f"expected blocks. Name classes of modules: activation_checkpointing=['Block']."
        )
    seen: set[nn.Module] = set()
    for name, block in found:
        if block not in seen:
            _warn_of_compiled(name, block)
            seen.add(block)
            yield name, block


def _uncompiled(blocks: Iterator[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for name, block in blocks:
        yield name, block._modules.get(COMPILED_MODULE) or block


def _warn_of_compiled(name: str, block: nn.Module) -> None:
    if has_compiled_call(block) and any(map(has_statistics, block.modules())):
        rank_zero_warn(
            f"The block {name!r} ({type(block).__name__}) is compiled and has running statistics, "
            f"which compiled code would update once more in its recomputation: under "
            f"activation_checkpointing it runs uncompiled. Name classes of modules without batch "
            f"norms in activation_checkpointing to compile it."
        )
