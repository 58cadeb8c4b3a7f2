"""What an optimizer keeps: of its parameters, and of itself, under keys that are no tensors.

optimizer.state[param] = {"exp_avg": ...}      cut, joined and saved as the parameter is
optimizer.state["k"] = 7                       the same on all ranks, whatever it is
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def of_parameters(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter that an optimizer keeps something of, with that."""
    return ((key, one) for key, one in optimizer.state.items() if isinstance(key, Tensor))


def of_itself(optimizer: Optimizer) -> dict[Any, Any]:
    """Return what an optimizer keeps under other keys."""
    return {key: one for key, one in optimizer.state.items() if not isinstance(key, Tensor)}


def host_copy(value: Any) -> Any:
    """Return a tensor's values in new memory of the CPU, without a graph; all else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
