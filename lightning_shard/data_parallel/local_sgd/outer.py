"""The outer optimizer as a user writes it: a name, a class with its arguments, or a function."""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from lightning_shard.core.options import Limit
from lightning_shard.data_parallel.local_sgd.rules import OuterFactory
from lightning_shard.errors import ConfigError

OuterOptimizer = (
    Annotated[str, Limit("that is 'nesterov'", lambda name: name == "nesterov")]
    | Annotated[
        dict[str, Any], Limit("with class_path and init_args", lambda one: "class_path" in one)
    ]
    | Callable[[list[torch.Tensor]], Optimizer]
    | None
)

_HOW = (
    "Pass 'nesterov' (SGD with lr=0.7 and Nesterov momentum 0.9), {'class_path': "
    "'torch.optim.SGD', 'init_args': {'lr': 0.7, ...}}, or a function of a list of tensors."
)


def outer_factory(outer: OuterOptimizer) -> OuterFactory | None:
    """Return the function that makes the outer optimizer; None where there is none.

    Raises:
        ConfigError: The option names no optimizer, or its class does not take the arguments.
    """
    factory = _factory(outer)
    if factory is None:
        return None
    try:
        made = factory([torch.zeros(1, requires_grad=True)])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"outer_optimizer={outer!r} cannot be made: {error}. {_HOW}") from error
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"outer_optimizer={outer!r} makes a {type(made).__name__}, expected a torch optimizer. "
            f"{_HOW}"
        )
    return factory


def _factory(outer: OuterOptimizer) -> OuterFactory | None:
    if isinstance(outer, str):
        return _nesterov
    return _of_class(outer) if isinstance(outer, dict) else outer


def plain_average(tensors: list[torch.Tensor]) -> Optimizer:
    """Make the optimizer whose step leads to the ranks' mean."""
    return torch.optim.SGD(tensors, lr=1.0)


def _nesterov(tensors: list[torch.Tensor]) -> Optimizer:
    """Make DiLoCo's outer optimizer, arXiv:2311.08105."""
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def _of_class(outer: dict[str, Any]) -> OuterFactory:
    module, _, name = str(outer["class_path"]).rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"outer_optimizer={outer!r} is not to be found: {error}. {_HOW}"
        ) from error
    arguments = dict(outer.get("init_args") or {})

    def make(tensors: list[torch.Tensor]) -> Optimizer:
        optimizer: Optimizer = kind(tensors, **arguments)
        return optimizer

    return make
