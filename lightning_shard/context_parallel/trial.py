"""A trial of whether a block computes the same of a sequence in parts: on copies of real arguments.

    full     hidden ──> block ──> result, gradients of arguments and parameters
    parts     hidden ──cut──> block ──gather──> the same, of the parameters the mean over the ranks

What has no rule is computed on the gathered sequence, so both are equal unless a block looks at
something that no tensor tells, or a rule is wrong. The first call of each kind of block is tried,
in evaluation mode so that nothing is dropped, and leaves the block as it was. It holds the
activations of one block for the full sequence, once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.recomputation import RECOMPUTED
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.compared_calls import (
    Arguments,
    Called,
    agreed_difference,
    as_it_was,
    explained,
    in_double,
)

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
    forward = own_forward(block)

    def in_full(given: Arguments) -> Any:
        return forward(*given[0], **given[1])

    def in_parts(given: Arguments) -> Any:
        args, kwargs = cut(*given) or given
        return forward(*args, **kwargs)

    def compared(double: bool) -> tuple[Called, Called]:
        with in_double(block, double=double) as copied:
            own = [*map(copied, params)]
            with as_it_was(block):
                full = Called(in_full, arguments, own, double=double)
            with as_it_was(block), explained(partial(_fails_in_parts, name, block, group)):
                parts = Called(in_parts, arguments, own, double=double)
        for grad in parts.of_params:  # the mean over the ranks, as the engine takes it
            group.all_reduce(grad)
            grad.div_(group.size)
        return full, parts

    found = agreed_difference(group, compared, names)
    if found is not None:
        raise ConfigError(
            f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) computes something "
            f"else of a sequence in {group.size} parts than of the full one: {found}. "
            f"Expected equal results, so nothing was trained. Use strategy='zero3' with "
            f"activation_checkpointing='full', or tensor_parallel with sequence_parallel=True; "
            f"please report the block's forward."
        )


def _fails_in_parts(name: str, block: nn.Module, group: Collectives, error: str) -> str:
    return (
        f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) runs with the full "
        f"sequence, but not with a sequence in {group.size} parts ({error}); expected operations "
        f"of torch that can be called with a subclass of Tensor. Use scaled_dot_product_attention "
        f"for attention, or strategy='zero3' with activation_checkpointing='full'."
    )


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """Return the forward that is not computed again in backward."""
    recomputed = vars(block).get(RECOMPUTED)
    set_on_block = vars(block).get("forward") if recomputed is None else recomputed.forward
    forward: Callable[..., Any] = set_on_block or type(block).forward.__get__(block)
    return forward
