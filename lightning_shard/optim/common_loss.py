"""The loss that an optimizer gets from a closure is the mean over the ranks.

    line search:   loss(w + t d) < loss(w) ?     asked of every rank's own batch, some say yes

Gradients are averages over the ranks, so an optimizer that looks at the loss has to see the average
as well, or ranks decide differently and their weights part ways. torch's own optimizers but LBFGS
hand the loss on without a look: for these nothing is sent.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError


def looks_at_loss(optimizer: Optimizer) -> bool:
    """Whether an optimizer may use what its closure returns; only torch's own are known not to."""
    return type(optimizer) is torch.optim.LBFGS or not type(optimizer).__module__.startswith(
        "torch.optim."
    )


def mean_loss(loss: Any, optimizer: Optimizer, ranks: Collectives, device: torch.device) -> Any:
    """Return the mean of what the ranks' closures have returned; each rank must call.

    Args:
        loss: A tensor of one element, a number, or None where this rank has no loss.
        optimizer: The optimizer whose closure gave the loss; error messages name its class.
        ranks: Group of the data-parallel ranks, each of which must call.
        device: Where the exchanged numbers lie, for the group's transport.

    Returns:
        The mean over the ranks that have a loss, of the type of `loss`; None where no rank
            has one.

    Raises:
        ConfigError: A loss is none of these, on this rank or on another one.
    """
    counts = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
    known = counts or loss is None
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    own = [float(loss) if counts else 0.0, float(counts), float(not known)]
    sums = torch.tensor(own, dtype=torch.float64, device=device)
    ranks.all_reduce(sums, "sum").wait()
    total, count, unknown = sums.tolist()
    if unknown:
        got = type(loss).__name__ if not known else "another type on another rank"
        raise ConfigError(
            f"Rank {ranks.rank}: the closure of {type(optimizer).__name__} returned {got}, "
            f"expected a loss of one element, whose mean over the ranks the optimizer is given. "
            f"Return the loss alone, or call optimizer.step() without a closure."
        )
    if not count:
        return None
    mean = total / count
    return loss.new_tensor(mean).reshape(loss.shape) if isinstance(loss, Tensor) else mean
