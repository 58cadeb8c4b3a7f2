"""Values that user code puts in the place of our views of parameters: taken over, or refused.

    p.data = value          the parameter no longer shows the view that we gave it
    module.p = Parameter()  the module no longer holds the parameter that we and the optimizer hold

The first is noticed by the address that a parameter shows: wherever it is about to show another
view, before anything reads our buffers, and once a step. The second is noticed once a step, too,
and before anything is saved. The value is copied, so that nobody shares it afterwards.

What no parameter of ours can stand for, as of another shape, stays where user code has put it: a
model that has such newcomers is laid out anew, or refused where that cannot be.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.core.modules import is_scripted
from lightning_shard.data_parallel.views.parameter_shard import ParameterShard, ShardView
from lightning_shard.data_parallel.views.tensor_properties import addresses_of
from lightning_shard.errors import ConfigError


class ShownViews:
    """The views that the parameters of a flat buffer show, in its order."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.are: Sequence[Tensor] = ()
        self._addresses: list[int] = []

    def show(self, views: Sequence[Tensor]) -> None:
        """Note that the parameters show these views from now on."""
        self.are = views
        self._addresses = addresses_of(views)

    @property
    def stand(self) -> bool:
        """Whether every parameter's memory begins where its view does; a quick check."""
        return not self._addresses or addresses_of(self._params) == self._addresses

    @property
    def have_their_form(self) -> bool:
        """Whether every parameter has the shape and the strides of its view."""
        return all(
            [*map(form, self._params)] == [*map(form, self.are)]
            for form in (Tensor.size, Tensor.stride)
        )

    @property
    def lie_straight(self) -> bool:
        """Whether every parameter is contiguous, as its view is."""
        return False not in [param.is_contiguous() for param in self._params]

    def assigned(self) -> list[int]:
        """Return the indices of the parameters that show another tensor, by a close check."""
        return [
            index
            for index, (param, view) in enumerate(zip(self._params, self.are, strict=False))
            if not (param.data_ptr() == self._addresses[index] and _equal_form(param, view))
        ]


def _equal_form(param: Tensor, view: Tensor) -> bool:
    same_shape = param.shape == view.shape and param.stride() == view.stride()
    return same_shape and param.dtype is view.dtype


@dataclass(frozen=True)
class _ParameterPath:
    """One path at which a model holds a parameter."""

    path: str
    module: nn.Module
    name: str
    param: nn.Parameter

    @property
    def full_name(self) -> str:
        """Name of the parameter in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(frozen=True, eq=False)
class ReplacedParameter:
    """A parameter of the model that is in its place again, and the newcomer that was put there.

    It has the newcomer's value now.
    """

    name: str
    module: nn.Module
    newcomer: nn.Parameter
    param: nn.Parameter


class ParameterPlaces:
    """Watches which parameter objects a model holds, and puts them back after user code.

    Args:
        shapes: The full shape of each parameter that the ranks share.
        fixed_modules: Whether modules that hold parameters must stay, since their hooks are needed.
        takes_newcomers: Whether the model is laid out anew where it has other parameters.

    Attributes:
        are_others: Whether the model has to be laid out anew, since it has other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        shapes: Mapping[nn.Parameter, Sequence[int]],
        *,
        fixed_modules: bool,
        takes_newcomers: bool,
    ) -> None:
        self._model, self._rank, self._fixed_modules = model, rank, fixed_modules
        self._shapes, self.takes_newcomers = shapes, takes_newcomers
        self._is_mixed = False  # known parameters stand in each other's places, or in two
        self._look()

    def _look(self) -> None:
        every = self._model.named_modules()
        modules = [(path, one) for path, one in every if not is_scripted(one)]
        self._places = [
            _ParameterPath(path, module, name, param)
            for path, module in modules
            for name, param in module._parameters.items()
            if param is not None
        ]
        newcomers = any(place.param not in self._shapes for place in self._places)
        self.are_others = self.takes_newcomers and (newcomers or self._is_mixed)
        for place in self._places if not self.takes_newcomers else ():
            base = place.param.base if isinstance(place.param, ShardView) else place.param
            if isinstance(base, ParameterShard):
                raise taken_out(
                    base.spread.name, f"the new parameter {place.full_name!r} lies in its shards"
                )
        children = [(m._modules, *item) for _, m in modules for item in m._modules.items()]
        self._holders: list[dict[str, Any]] = [
            *(place.module._parameters for place in self._places),
            *(held for held, _, _ in children),
        ]
        self._names = [*(place.name for place in self._places), *(name for _, name, _ in children)]
        self._known = [*(place.param for place in self._places), *(one for _, _, one in children)]
        self._all = [held for _, one in modules for held in (one._parameters, one._modules)]
        self._sizes = [*map(len, self._all)]

    @property
    def are_as_known(self) -> bool:
        """Whether modules hold what they held when this has looked last."""
        same = all(map(is_, map(dict.get, self._holders, self._names), self._known))
        return same and [*map(len, self._all)] == self._sizes

    def put_back(
        self, take: Callable[[nn.Parameter, Tensor], None]
    ) -> Sequence["ReplacedParameter"]:
        """Put back the parameters that user code has replaced, with the new values."""
        if self.are_as_known:
            return ()
        replaced = []
        modules = dict(self._model.named_modules(remove_duplicate=False))
        newcomers: dict[nn.Parameter, dict[_ParameterPath, nn.Parameter]] = {}
        for place in self._places:
            module = modules.get(place.path)
            new = None if module is None else module._parameters.get(place.name)
            if new is not None and new is not place.param:
                newcomers.setdefault(place.param, {})[place] = new
        left = set(self._model.parameters())
        for param, news in newcomers.items():
            new = next(iter(news.values()))
            is_known = new in self._shapes  # its own shape may be that of this rank's shard
            if self.takes_newcomers and (is_known or new.shape != self._shapes.get(param)):
                self._is_mixed |= is_known
                continue
            try:
                self._check(param, news, left, modules)
            except ConfigError:
                if self.takes_newcomers:
                    self._is_mixed = True
                    continue
                for place in self._places:  # the run's end is to meet what it knows
                    place.module._parameters[place.name] = place.param
                raise
            take(param, new.detach())
            param.requires_grad_(new.requires_grad)
            for place, one in news.items():
                modules[place.path]._parameters[place.name] = param
                replaced.append(ReplacedParameter(place.full_name, modules[place.path], one, param))
        self._look()
        return replaced

    def _check(
        self,
        param: nn.Parameter,
        news: Mapping[_ParameterPath, nn.Parameter],
        left: Collection[nn.Parameter],
        modules: Mapping[str, nn.Module],
    ) -> None:
        place, first = next(iter(news.items()))
        if self._fixed_modules and modules[place.path] is not place.module:
            raise ConfigError(
                f"Rank {self._rank}: the module that held the parameter {place.full_name!r} was "
                f"replaced by another one during the run, expected the module whose parameters are "
                f"shared out over the ranks. Load the new values into it: "
                f"module.load_state_dict(other.state_dict())."
            )
        self._refuse_tie(place, set(news.values()))
        same = all(one.shape == first.shape and torch.equal(one, first) for one in news.values())
        if param in left or not same:
            raise ConfigError(
                f"Rank {self._rank}: {place.full_name!r} was replaced by another parameter, but "
                f"the model holds the old one in several places, expected all of them to be "
                f"replaced by equal values. Copy the value into it: "
                f"with torch.no_grad(): module.{place.name}.copy_(value)."
            )

    def _refuse_tie(self, place: _ParameterPath, news: Collection[nn.Parameter]) -> None:
        """Refuse a parameter that stands in the place of another one, and in a place of its own."""
        others = [
            other.full_name
            for other in self._places
            if other.param is not place.param
            and (other.param in news or other.module._parameters.get(other.name) in news)
        ]
        if others:
            raise ConfigError(
                f"Rank {self._rank}: {place.full_name!r} was replaced by the parameter of "
                f"{others[0]!r} during the run, expected one that stands nowhere else: the ranks "
                f"and the optimizers have a place for each. Tie parameters before the fit, in "
                f"__init__ or configure_model, or copy the value: with torch.no_grad(): "
                f"module.{place.name}.copy_(value)."
            )


def refuse_shape(
    name: str, got: Sequence[int], expected: Sequence[int], full: Sequence[int], rank: int
) -> ConfigError:
    """Return the error for an assigned value that does not have the parameter's shape."""
    shard = f", this rank's shard of {tuple(full)}" if tuple(expected) != tuple(full) else ""
    return ConfigError(
        f"Rank {rank}: a tensor of shape {tuple(got)} was assigned to the parameter {name!r}, "
        f"expected {tuple(expected)}{shard}. Assign tensors of the parameter's shape, or change "
        f"the model in configure_model, before the fit."
    )


def refuse_moved(names: Sequence[str], rank: int) -> ConfigError:
    """Return the error for values that are assigned between a forward and its backward."""
    return ConfigError(
        f"Rank {rank}: {', '.join(map(repr, names))} of a block was assigned between the block's "
        f"forward and its backward, which under ZeRO stage 3 gathers it again and needs the values "
        f"of the forward; expected it to stay. Assign in on_train_batch_start or "
        f"on_train_batch_end, or use strategy='zero2'."
    )


def taken_out(name: str, why: str) -> ConfigError:
    """Return the error for a parameter that user code has taken out of its module in a run."""
    return ConfigError(
        f"Prune, or parametrize, the model before the fit, or after it, or use strategy='zero3'. "
        f"{name!r} was taken out of its module in the middle of a run, as torch.nn.utils.prune "
        f"does, but {why}; expected the names that the model had."
    )
