"""The mixtures of a model whose experts are on several ranks: their forwards, until `restore`.

    mixture(tokens) ──> own class with another forward ──> exchange, own forward of the experts here

A trial tells whether a mixture computes the same with its experts on several ranks as with all of
them, brought together: results, and gradients of tokens, routing and experts. A router whose
gradient is wrong shows here, where the loss is right. The first call of each class of mixtures is
tried, and leaves the mixture as it was.

Experts' weights look full, in a step, to all code but the experts' own forwards.

    in their forward     gate_up (E / W, 2 I, H)      this rank's experts
    in user code         gate_up (E, 2 I, H)          gathered where an operation needs elements
                         its gradient                 summed over the ranks, / W, own experts' taken

Each rank's loss may make something else of the full weights, so gradients of all ranks are summed;
the engine takes the mean over ranks, of which those that have an expert are W times fewer.
Gathering is collective: each rank must ask for the same weights, in one order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import (
    ModuleCopies,
    SharedByCopies,
    extend_class,
    give_class_back,
)
from lightning_shard.core.placeholders import Placeholder, is_alone, is_placeholder, stands_in
from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.torch_private import pass_for_parameter, unobserved, untraced
from lightning_shard.data_parallel.units.units import class_name
from lightning_shard.data_parallel.views.sharded_parameter import bring_full
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.batched import BatchedExperts, OwnRows
from lightning_shard.expert_parallel.finding import Mixture
from lightning_shard.expert_parallel.listed import ListedExperts
from lightning_shard.expert_parallel.load import ExpertLoad, loads_of_ranks
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.tensor_parallel.dim_sharded_tensor import Part, showing, wrapped
from lightning_shard.tensor_parallel.full_view import (
    WeightView,
    seeing,
    set_view,
    view_of,
)
from lightning_shard.tensor_parallel.regions import (
    all_reduced,
    copy_to_region,
    gather_to_region,
    reduce_from_region,
    scale_gradient,
)
from lightning_shard.tensor_parallel.trial import (
    Arguments,
    Called,
    as_it_was,
    explained,
    in_double,
    refuse_difference,
)

Forward = Callable[..., Any]
_PLACE = "_lightning_shard_experts"
Calls = BatchedExperts | ListedExperts


_STANDS_IN = "_lightning_shard_stands_in"


@dataclass(frozen=True, kw_only=True)
class ExpertPart(Part):
    """One rank's experts' part of a weight; see the module.

    Attributes:
        anchor: A leaf without elements, to which gradients go where no element is here.
        in_pipeline: Whether backwards ask for the gradients of some tensors only.
    """

    computes: ClassVar[bool] = False  # operations are left to the full tensor

    param: nn.Parameter
    experts: ExpertSplit
    anchor: Tensor
    in_pipeline: bool

    @property
    @override
    def full_shape(self) -> Sequence[int]:
        return self.experts.full_shape(self.param)

    @override
    def gather(self) -> Tensor:
        if self.experts.is_batched(self.param):
            full = gather_to_region(self.local, 0, self.group)
        else:
            self._check_pipeline()
            full = copy_to_region(reduce_from_region(self._own_or_zeros(), self.group), self.group)
        return scale_gradient(full, 1 / self.group.size, self.group)

    def _check_pipeline(self) -> None:
        """Refuse a gradient that only the rank with the expert would take part in."""
        if self.in_pipeline and self.local.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"Rank {self.group.rank}: a step in a pipeline reads a weight of shape "
                f"{tuple(self.full_shape)} of an expert in a list, which one of "
                f"{self.group.size} ranks has; expected reading without gradients. Read "
                f"weight.detach(), or leave expert_parallel_size or pipeline_parallel_size out."
            )

    def _own_or_zeros(self) -> Tensor:
        if self.experts.is_here(self.param):
            return self.local
        zeros = self.local.new_zeros(self.full_shape)
        return zeros + self.anchor.sum().to(zeros) if self.local.requires_grad else zeros

    @override
    def gather_detached(self) -> Tensor:
        return self.experts.full(self.param, self.local.detach())

    @override
    def split(self, value: Tensor, dim: int) -> Tensor:
        return self._own(value)

    @override
    def narrow(self, value: Any) -> Any:
        return self._own(value) if isinstance(value, Tensor) else value

    @override
    def own_gradient(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._own(all_reduced(value, self.group) / self.group.size)

    def _own(self, full: Tensor) -> Tensor:
        if not self.experts.is_here(self.param):
            return full.new_empty(0)
        return self.experts.local(self.param, full)


class ExpertWeights:
    """Decides how experts' weights are seen."""

    def __init__(self, split: ExpertSplit, *, in_pipeline: bool = False) -> None:
        self._split, self._in_pipeline = split, in_pipeline
        self._is_in_step = False

    def step(self, *, in_hook: bool = False) -> AbstractContextManager[None]:
        """Show full weights inside, to code outside of the experts' forwards.

        With `in_hook` they are shown as they are, to a hook that the step calls, which sees them
        full.
        """
        return setting(self, _is_in_step=not in_hook)

    def look(self, param: nn.Parameter, tensor: Tensor, anchor: Tensor, *, at_once: bool) -> Tensor:
        """Return what looks full of a parameter, or of what stands for it, while a step runs.

        It is gathered `at_once`, or where an operation needs elements. Each backward has a gradient
        of `anchor`, a leaf without elements.
        """
        split = self._split
        shape = split.full_shape(param)
        if not self._is_in_step or self._is_full(param, tensor) or not bring_full(tensor):
            return tensor
        if is_placeholder(tensor):
            return Placeholder.of(tensor, shape, getattr(tensor, "origin", ""))
        part = ExpertPart(
            local=tensor,
            dim=0,
            group=split.group,
            param=param,
            experts=split,
            anchor=anchor,
            in_pipeline=self._in_pipeline,
        )
        if at_once:
            return part.gather()
        wide = wrapped(part)
        pass_for_parameter(wide)
        return showing(wide, tensor)

    def _is_full(self, param: nn.Parameter, tensor: Tensor) -> bool:
        """Whether a tensor, of a copy say, is what every rank has in full."""
        if self._split.is_batched(param):
            return tensor.shape == self._split.full_shape(param)
        return tensor is not param and not is_standing_in(tensor) and tensor.numel() > 0


def standing_in(tensor: Tensor) -> Tensor:
    """Let a tensor be seen as the parameter in whose place it is put is seen."""
    vars(tensor)[_STANDS_IN] = True
    return tensor


def is_standing_in(tensor: Tensor) -> bool:
    """Whether a tensor has been put in the place of a parameter, as what is here of it."""
    return _STANDS_IN in vars(tensor)


@dataclass(kw_only=True)
class ExpertView(WeightView):
    """How the weights of one module of an expert are seen."""

    why = "each rank has some of the experts"
    weights: ExpertWeights
    calls: Calls
    inner: WeightView | None

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter as the code that reads it now sees it."""
        if name in self.names and not self.calls.is_own:
            at_once, anchor = self.inner is not None, self.calls.anchor
            with having(asker, Asker.ENGINE):
                tensor = self.weights.look(self.names[name], tensor, anchor, at_once=at_once)
        return tensor if self.inner is None else self.inner.of(name, tensor)


def try_mixture(
    calls: Calls, module: nn.Module, own: Forward, arguments: Arguments, split: ExpertSplit
) -> None:
    """Call a mixture with all experts and with those of its ranks, and compare; each must call."""
    named = dict(module.named_parameters())
    experts = {name: one for name, one in named.items() if split.groups_of(one)}
    others = {n: one for n, one in named.items() if n not in experts and one.requires_grad}
    here = [n for n, one in experts.items() if split.is_here(one) and one.requires_grad]
    compared = partial(_compared, calls, module, own, arguments, split, experts, others)

    def differs(found: str) -> str:
        return (
            f"Rank {split.group.rank}: the mixture {calls.mixture.name!r} ({class_name(module)}) "
            f"computes something else with its {calls.mixture.num_experts} experts on "
            f"{split.group.size} ranks than with all on one: {found}. Expected equal results, so "
            f"nothing was trained. Leave expert_parallel_size out, and use zero_stage=3 to share "
            f"out parameters; please report the forward of the mixture."
        )

    with unobserved():
        refuse_difference(split.group, compared, [*others, *here], differs)


def _compared(
    calls: Calls,
    module: nn.Module,
    own: Forward,
    arguments: Arguments,
    split: ExpertSplit,
    experts: Mapping[str, nn.Parameter],
    others: Mapping[str, nn.Parameter],
    double: bool,
) -> tuple[Called, Called]:
    """Return the calls with all experts, and with those of each rank."""

    def fails(error: str) -> str:
        return (
            f"Rank {split.group.rank}: the mixture {calls.mixture.name!r} ({class_name(module)}) "
            f"runs with all experts on one rank, but not with its {calls.mixture.num_experts} "
            f"experts on {split.group.size} ranks ({error}); expected that it calls its experts "
            f"and reads nothing of them. Leave expert_parallel_size out, and use zero_stage=3 to "
            f"share out parameters."
        )

    whole_call = calls.whole(module, own)
    full = {n: split.full(one, split.like(one)) for n, one in experts.items()}
    local = {n: one.data.clone() for n, one in experts.items()}
    trained = [n for n, one in experts.items() if one.requires_grad]
    with in_double(module, double=double) as copied:
        rest = [*map(copied, others.values())]
        leaves = {n: _leaf(copied(one), experts[n]) for n, one in full.items()}
        with as_it_was(module), _in_place(module, leaves):
            whole = Called(
                lambda given: whole_call(*given[0], **given[1]),
                arguments,
                [*rest, *(leaves[n] for n in trained)],
                double=double,
            )
        leaves = {n: standing_in(_leaf(copied(one), experts[n])) for n, one in local.items()}
        with as_it_was(module), _in_place(module, leaves), explained(fails):
            shared = Called(
                lambda given: calls.call(module, own, *given),
                arguments,
                [*rest, *(leaves[n] for n in trained if split.is_here(experts[n])), calls.anchor],
                double=double,
            )
    _take_mean(whole, len(others), {n: experts[n] for n in trained}, split)
    return whole, shared


def _leaf(value: Tensor, param: nn.Parameter) -> Tensor:
    return value.detach().requires_grad_(param.requires_grad and torch.is_grad_enabled())


def _take_mean(
    whole: Called, num_others: int, experts: Mapping[str, nn.Parameter], split: ExpertSplit
) -> None:
    """Let the experts' gradients be the mean over the ranks, of those that are here."""
    first = whole.num_sources + num_others
    means = []
    for param, grad in zip(experts.values(), whole.gradients[first:], strict=False):
        split.group.all_reduce(grad)
        if split.is_here(param):
            means.append(split.local(param, grad / split.group.size))
    whole.gradients[first:] = means


@contextmanager
def _in_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors stand for parameters inside, whose own values nobody touches."""
    with ExitStack() as places:
        for path, tensor in tensors.items():
            parent, _, name = path.rpartition(".")
            held = module.get_submodule(parent).__dict__["_parameters"]
            places.enter_context(patch.dict(held, {name: tensor}))
        yield


class SharedExperts(SharedByCopies):
    """Lets the mixtures of a model send tokens to the ranks of their experts.

    Args:
        mixtures: The mixtures, whose experts have been split.
        split: How they are split.
        with_shards: Makes a context inside which parameters are what this rank has of them.
        in_pipeline: Whether the model is cut into stages.
        counts: Whether this rank counts tokens that others of its sequence compute as well.
        tries: Whether the first call of each class of mixtures is tried before it is believed.
        is_dry: Whether nothing has elements, so that tokens go to all experts alike.
    """

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        split: ExpertSplit,
        with_shards: Callable[[], AbstractContextManager[object]],
        *,
        in_pipeline: bool = False,
        counts: bool = True,
        tries: bool = True,
        is_dry: bool = False,
    ) -> None:
        self._split, self._with_shards, self._tries = split, with_shards, tries
        self._counts = counts
        self._tried: set[tuple[type[nn.Module], bool]] = set()
        self._calls: dict[str, Calls] = {}
        self._changed: list[nn.Module] = []
        self.weights = ExpertWeights(split, in_pipeline=in_pipeline)
        for one in mixtures:
            calls: Calls = (
                BatchedExperts(one, split.group, is_dry=is_dry)
                if one.is_batched
                else ListedExperts(one, split.group, in_pipeline=in_pipeline, is_dry=is_dry)
            )
            self._calls[one.name] = calls
            self._change(one.module, one.name, _Mixing, (self, calls), calls)
            for number, expert in enumerate(one.experts):
                name = f"{one.name}.{number}"
                self._change(expert, name, _OneOfMany, (calls, number), calls)
                for inner_name, inner in list(expert.named_modules())[1:]:
                    self._change(inner, f"{name}.{inner_name}", _Inner, None, calls)
        self._copies = ModuleCopies("experts")
        self._copies.watch(self._changed)

    def _change(self, module: nn.Module, layer: str, mixin: type, place: Any, calls: Any) -> None:
        held: dict[str, Any] = module.__dict__["_parameters"]
        params = {name: one for name, one in held.items() if self._split.is_spread(one)}
        if mixin is _Inner and not params:
            return
        inner = view_of(module)
        vars(module)[_PLACE] = place, inner
        if params:
            view = ExpertView(
                weights=self.weights, names=params, calls=calls, inner=inner, layer=layer
            )
            set_view(module, view)
        extend_class(module, "Shared", mixin, seeing(params))
        self._changed.append(module)

    @untraced
    def run(self, calls: Calls, module: nn.Module, own: Forward, arguments: Arguments) -> Any:
        """Call a mixture; each rank that shares its experts must."""
        if stands_in(module, arguments):
            return calls.whole(module, own)(*arguments[0], **arguments[1])
        if is_alone():
            return calls.alone(module, own, *arguments)
        rows = OwnRows.of(*arguments) if isinstance(calls, BatchedExperts) else None
        calls.load.is_counted = self._counts or rows is not None
        if rows is None:
            return self._call(calls, module, own, arguments)
        here = self._call(calls, module, own, (tuple(rows.args), dict(rows.kwargs)))
        return rows.of_all(here)

    def _call(self, calls: Calls, module: nn.Module, own: Forward, arguments: Arguments) -> Any:
        with self._with_shards():
            if calls.is_full(module):  # a copy with full weights
                return calls.whole(module, own)(*arguments[0], **arguments[1])
            kind = type(module), torch.is_grad_enabled()
            if self._tries and kind not in self._tried:
                self._tried.add(kind)
                try_mixture(calls, module, own, arguments, self._split)
            return calls.call(module, own, *arguments)

    def load(self, others: Sequence[Collectives]) -> Mapping[str, ExpertLoad]:
        """Return by name how tokens were shared out; each rank must call.

        `others` are groups of further ranks that count: with the same experts, with other stages.
        """
        own = {name: (one.load, one.mixture.num_experts) for name, one in self._calls.items()}
        return loads_of_ranks(own, self._split.group, others)

    def restore(self) -> None:
        """Give the mixtures, and copies that were made in the run, their own forwards back."""
        self._copies.end()
        for module in (*self._changed, *self._copies.take()):
            _, inner = vars(module).pop(_PLACE)
            set_view(module, inner)
            give_class_back(module, (_Mixing, _OneOfMany, _Inner))
        self._changed = []


class _Mixing:
    """A mixture whose experts are on several ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shared, calls = vars(self)[_PLACE][0]
        own = super().forward  # type: ignore[misc]
        return shared.run(calls, self, own, (args, kwargs))


class _OneOfMany:
    """An expert of a list."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls, number = vars(self)[_PLACE][0]
        return calls.expert_called(number, self, super().forward, args, kwargs)  # type: ignore[misc]


class _Inner:
    """A module inside of an expert."""
