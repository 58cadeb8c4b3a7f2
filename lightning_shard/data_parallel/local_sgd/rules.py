"""The rules by which ranks come to common values: what they send, and how they use its mean.

    SyncRule             send the parameters              common = their mean
    OuterOptimization    send global - own (the outer     global = outer step by the mean
                         gradient of the last steps)      common = global

The second is DiLoCo (arXiv:2311.08105); with plain SGD of learning rate 1 it is the first. For one
exchange tensors of many shapes are one flat buffer, in which narrow formats travel in float32: a
step is often too small for them to represent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.options import Limit
from lightning_shard.data_parallel.optimizer_entries import host_copy, of_itself, of_parameters
from lightning_shard.errors import ConfigError

OuterFactory = Callable[[list[Tensor]], Optimizer]
Sent = Literal["values", "changes"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which sums over ranks and steps are kept."""
    return torch.promote_types(dtype, torch.float32)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one new flat buffer of real numbers, at least float32."""
    flat = [_real(tensor).reshape(-1) for tensor in tensors]
    dtype = reduce(torch.promote_types, (part.dtype for part in flat), torch.float32)
    return torch.cat([part.to(dtype) for part in flat])


def unpack(buffer: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer in the shapes of `like`, as views where formats allow."""
    shapes = [(_real(tensor), tensor) for tensor in like]
    parts = torch.split(buffer, [real.numel() for real, _ in shapes])
    return [
        # a view of complex numbers has to begin at an even place
        torch.view_as_complex(part.view(real.shape).clone())
        if tensor.is_complex()
        else part.view(real.shape)
        for part, (real, tensor) in zip(parts, shapes, strict=True)
    ]


def mean_over_ranks(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """Average tensors over the ranks; each rank must call with the same shapes."""
    if not tensors:
        return []
    buffer = pack(tensors)
    collectives.all_reduce(buffer, "avg").wait()
    return unpack(buffer, tensors)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class SyncRule:
    """The rule by which ranks come to common values: this one takes the mean of the ranks' own."""

    sends: Sent = "values"

    @property
    def common(self) -> Mapping[str, Tensor]:
        """Values common to all ranks by name, where the rule keeps them."""
        return {}

    def outgoing(self, own: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors to send for parameters that have these values on this rank."""
        return list(own.values())

    def arrived(self, mean: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the new common values, from the ranks' mean of what was sent."""
        return mean

    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Go on from values that are the same on all ranks, of more parameters or known ones."""

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint has to hold besides the common values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state` has returned."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the rule holds."""
        return []


class OuterOptimization(SyncRule):
    """Common values are kept, and an outer optimizer moves them, maybe some without a gradient."""

    sends: Sent = "changes"

    def __init__(self, values: Mapping[str, Tensor], factory: OuterFactory) -> None:
        self._common = _kept(values)
        self._optimizer = factory(list(self._common.values()))

    @property
    @override
    def common(self) -> dict[str, Tensor]:
        return self._common

    @override
    def adopt(self, values: Mapping[str, Tensor]) -> None:
        for name in values.keys() & self.common.keys():
            self.common[name].detach().copy_(values[name])
        if new := _kept({name: values[name] for name in values if name not in self.common}):
            self._common.update(new)
            self._optimizer.add_param_group({"params": list(new.values())})

    @torch.no_grad()
    @override
    def outgoing(self, own: Mapping[str, Tensor]) -> list[Tensor]:
        return [self.common[name] - value for name, value in own.items()]

    @override
    def arrived(self, mean: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, gradient in mean.items():
            self.common[name].grad = gradient.to(self.common[name].dtype)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {name: self.common[name].detach() for name in mean}

    @override
    def state(self) -> dict[str, Any]:
        """See `SyncRule`: the outer optimizer's class, and its state by parameter name."""
        state = {
            name: {key: host_copy(value) for key, value in self._optimizer.state[tensor].items()}
            for name, tensor in self.common.items()
            if tensor in self._optimizer.state
        }
        kind, own = type(self._optimizer).__name__, of_itself(self._optimizer)
        return {"optimizer": kind, "state": state, "own": own}

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        """See `SyncRule`; another optimizer's state and names that are not here are left out."""
        if state.get("optimizer") != type(self._optimizer).__name__:
            return
        packed = self._optimizer.state_dict()
        names: Sequence[str] = list(self.common)
        order = {name: index for index, name in enumerate(names)}
        entries = {order[name]: one for name, one in state["state"].items() if name in order}
        own = state.get("own", {})
        self._optimizer.load_state_dict({**packed, "state": {**own, **entries}})

    @override
    def tensors(self) -> list[Tensor]:
        states = [state for _, state in of_parameters(self._optimizer)]
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*self.common.values(), *held]


def _kept(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().to(wide(value.dtype), copy=True).requires_grad_()
        for name, value in values.items()
    }


OuterOptimizer = (
    Annotated[str, Limit("that is 'nesterov'", lambda name: name == "nesterov")]
    | Annotated[
        dict[str, Any], Limit("with class_path and init_args", lambda one: "class_path" in one)
    ]
    | Callable[[list[Tensor]], Optimizer]
    | None
)

_HOW = (
    "Pass 'nesterov' (SGD with lr=0.7 and Nesterov momentum 0.9), {'class_path': "
    "'torch.optim.SGD', 'init_args': {'lr': 0.7, ...}}, or a function of a list of tensors."
)


def outer_factory(outer: OuterOptimizer) -> OuterFactory | None:
    """Return the function that makes the outer optimizer; None where there is none."""
    if outer is None:
        return None
    factory = _of_class(outer) if isinstance(outer, dict) else outer
    factory = _nesterov if isinstance(factory, str) else factory
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


def plain_average(tensors: list[Tensor]) -> Optimizer:
    """Make the optimizer whose step leads to the ranks' mean."""
    return torch.optim.SGD(tensors, lr=1.0)


def _nesterov(tensors: list[Tensor]) -> Optimizer:
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

    def make(tensors: list[Tensor]) -> Optimizer:
        optimizer: Optimizer = kind(tensors, **arguments)
        return optimizer

    return make
