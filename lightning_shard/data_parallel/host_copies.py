"""Values of an optimizer's state on the CPU, apart from what training goes on to change."""

from typing import Any

from torch import Tensor


def host_copy(value: Any) -> Any:
    """Return a tensor's values in new memory of the CPU, without a graph; all else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
