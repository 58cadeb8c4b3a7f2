"""Parameters on torch's "meta" device: who knows their values when a run begins."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.torch_private import exchange_contents, has_gradient_hooks
from lightning_shard.errors import ConfigError


class ValuesAtStart(Protocol):
    """Knows the values of parameters that are on meta."""

    device: torch.device

    def fill(self, param: nn.Parameter, target: Tensor) -> None:
        """Write the values of `param` to a tensor of its shape, in any format."""


def put_values(
    params: Iterable[nn.Parameter], targets: Iterable[Tensor], start: ValuesAtStart | None
) -> None:
    """Write parameters' values to tensors of their shapes, in any format."""
    for param, target in zip(params, targets, strict=True):
        if not param.is_meta:
            target.copy_(param.data)
        elif start is not None:
            start.fill(param, target)


def give_memory(param: nn.Parameter, value: Tensor) -> None:
    """Let a parameter on meta lie in memory; it stays the same object, with all that is set on it.

    Raises:
        ConfigError: Something refers to the parameter in a way that does not allow it.
    """
    if has_gradient_hooks(param):
        raise ConfigError(
            f"A parameter on meta of shape {tuple(param.shape)} has a hook, which would be lost "
            f"when it gets its values; expected none. Register it in on_fit_start or later."
        )
    made = nn.Parameter(value.new_empty(0), requires_grad=param.requires_grad)
    try:
        exchange_contents(param, made)
    except RuntimeError as error:
        raise ConfigError(
            f"A parameter on meta of shape {tuple(param.shape)} cannot be given its values, since "
            f"a graph refers to it; expected modules and optimizers alone. Compute with it in "
            f"on_fit_start or later."
        ) from error
    param.data = value  # and counts its changes by itself
