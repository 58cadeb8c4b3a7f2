"""The rules by which ranks come to common values: what they send, and how they use its mean.

    SyncRule             send the parameters              common = their mean
    OuterOptimization    send global - own (the outer     global = outer step by the mean
                         gradient of the last steps)      common = global

The second is DiLoCo (arXiv:2311.08105); with plain SGD of learning rate 1 it is the first. For one
exchange tensors of many shapes are one flat buffer, in which narrow formats travel in float32: a
step is often too small for them to represent.

The schedule by which fragments of parameters are exchanged: arithmetic over optimizer steps.

    sync_every=6, fragments=2, overlap_steps=1            (b begins, l lands)

    step         1   2   3   4   5   6   7   8   9  10  11  12  13
    fragment 0           b   l                   b   l
    fragment 1                       b   l                   b   l

Steps count from the end of the warm-up. Turns are spread evenly, so that at no time more than a
part of the model travels. Source: streaming DiLoCo, arXiv:2501.18512.

The ranks' optimizer states in a checkpoint: their mean, and each rank's own by name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.options import AtLeastOne, AtLeastZero, Limit, Options
from lightning_shard.data_parallel.optimizer_entries import (
    host_copy,
    of_itself,
    of_parameters,
    tensors_of,
)
from lightning_shard.errors import ConfigError

KeptShare: TypeAlias = Annotated[
    float,
    Limit(
        "of at least 0 (take over the common values) and below 1 (keep the own ones)",
        lambda share: 0.0 <= share < 1.0,
    ),
]


@dataclass(frozen=True, kw_only=True)
class SyncSchedule(Options):
    """When ranks that train by themselves exchange what.

    Attributes:
        sync_every: Steps between two exchanges of the same parameters.
        warmup_steps: Steps at the beginning that average gradients, as "shard_ddp" does: post-local
            SGD. Of a batch with several steps by hand, all belong to it if one does.
        fragments: Parts of the model that are exchanged in turns.
        overlap_steps: Steps that training goes on while a fragment travels.
        mixing: The share of its own parameters that a rank keeps when a fragment lands; by default
            0, with `overlap_steps` 0.5.

    Raises:
        ConfigError: The numbers make no schedule.
    """

    sync_every: AtLeastOne = 10
    warmup_steps: AtLeastZero = 0
    fragments: AtLeastOne = 1
    overlap_steps: AtLeastZero = 0
    mixing: KeptShare | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no schedule, before any process starts."""
        super().__post_init__()
        if self.fragments > self.sync_every:
            raise ConfigError(
                f"fragments={self.fragments} take turns within sync_every={self.sync_every} steps, "
                f"expected at most one fragment per step. Use fewer fragments, or a larger "
                f"sync_every."
            )
        if self.overlap_steps >= self.sync_every:
            raise ConfigError(
                f"overlap_steps={self.overlap_steps} must be below sync_every={self.sync_every}: "
                f"a fragment has to land before it is sent again."
            )

    @property
    def kept_share(self) -> float:
        """The share of its own parameters that a rank keeps when a fragment lands."""
        usual = 0.5 if self.overlap_steps else 0.0
        return usual if self.mixing is None else self.mixing

    def is_warming_up(self, step: int) -> bool:
        """Whether ranks still average gradients after `step` steps of the run."""
        return step < self.warmup_steps

    def beginning(self, step: int) -> list[int]:
        """Return the fragments whose exchange begins after `step` steps of the run."""
        turn = (step - self.warmup_steps) % self.sync_every
        return [part for part in range(self.fragments) if self._turn(part) == turn]

    def _turn(self, fragment: int) -> int:
        return (fragment + 1) * self.sync_every // self.fragments % self.sync_every

    def ends_round(self, step: int) -> bool:
        """Whether every fragment has had its turn after `step` steps of the run."""
        return (step - self.warmup_steps) % self.sync_every == 0


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


_StateKey = tuple[int, str]  # the parameter's number and the key of its state


@contextmanager
def averaged_state(optimizer: Optimizer, collectives: Collectives) -> Iterator[None]:
    """Let an optimizer hold the mean of the ranks' states inside; each rank must enter.

    The mean of a parameter is over the ranks that have state. Counters stay each rank's own, and so
    does a state in few bits.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own, shown = dict(optimizer.state), dict[nn.Parameter, dict[str, Any]]()
    for (index, key), mean in _means(params, optimizer, collectives).items():
        param = params[index]
        shown.setdefault(param, dict(own.get(param, {})))[key] = mean
    # dictionaries of their own: what is saved of them inside may be written after
    optimizer.state.update({param: dict(entries) for param, entries in shown.items()})
    try:
        yield
    finally:
        for param, entries in shown.items():
            _take_back(optimizer, param, entries, own.get(param))


def _take_back(
    optimizer: Optimizer, param: nn.Parameter, shown: dict[str, Any], own: dict[str, Any] | None
) -> None:
    """Give a parameter its rank's own state, but what a method of the optimizer has put there."""
    found = optimizer.state.get(param, {})
    put = {key: value for key, value in found.items() if shown.get(key) is not value}
    if own is None and not put:
        optimizer.state.pop(param, None)
    else:
        optimizer.state[param] = {} if own is None else own
        optimizer.state[param].update(put)


def state_by_name(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state on this rank, by parameter name; nothing is copied."""
    return {
        names[param]: dict(optimizer.state[param])
        for group in optimizer.param_groups
        for param in group["params"]
        if param in optimizer.state and param in names  # not what a module has lost in mid-run
    }


def with_state_by_name(
    packed: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
) -> dict[str, Any]:
    """Return a checkpoint's `state_dict` with this rank's own state in the place of the mean.

    The own state is what `state_by_name` has returned; the parameters are in the same order.
    """
    if "state" not in packed:  # there is no optimizer, or it has a form of its own
        return dict(packed)
    groups = packed["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        number: dict(own[names[param]])
        for number, param in zip(numbers, params, strict=True)
        if names.get(param) in own
    }
    others = {key: one for key, one in packed["state"].items() if key not in numbers}
    return {**packed, "state": {**others, **state}}


def _means(
    params: list[nn.Parameter], optimizer: Optimizer, collectives: Collectives
) -> dict[_StateKey, Tensor]:
    mine = {
        (index, key): value
        for index, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
        if _belongs_to_elements(key, value, param) and not _has_codes(optimizer.state[param])
    }
    kinds = {place: (tuple(value.shape), value.dtype) for place, value in mine.items()}
    on_ranks = collectives.all_gather_object(kinds)
    means: dict[_StateKey, Tensor] = {}
    for place in sorted(set().union(*on_ranks)):
        having = [kinds[place] for kinds in on_ranks if place in kinds]
        shape, dtype = having[0]
        value = mine.get(place)
        if value is None:
            value = torch.zeros(shape, dtype=dtype, device=params[place[0]].device)
        (mean,) = mean_over_ranks([value], collectives)
        means[place] = (mean * (len(on_ranks) / len(having))).to(dtype)
    return means


def _has_codes(entries: Mapping[str, Any]) -> bool:
    """Whether a state lies in few bits, whose scales by themselves have no mean."""
    return any(not one.is_floating_point() and one.ndim for one in tensors_of(entries))


def _belongs_to_elements(key: str, value: Any, param: nn.Parameter) -> bool:
    """Whether a state entry has a value per element, in contrast to a counter."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return value.ndim > 0 or (param.ndim == 0 and key != "step")
