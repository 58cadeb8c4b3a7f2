"""Takes values over that user code has assigned to parameters, before anything reads our buffers.

An optimizer on one device goes on with the parameter that it has: what user code puts in its place
is trained only if it gives it to the optimizer. `load_state_dict(assign=True)` loads values, which
are trained on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_shard.core.modules import hookable
from lightning_shard.data_parallel.memory.assigned import ParameterPlaces, ReplacedParameter
from lightning_shard.data_parallel.memory.equal_weights import EqualWeights
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.memory.shared_memory import overlapping
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.views.parameter_shard import ParameterShard, ShardView
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.errors import ConfigError

_SHARDS = (ParameterShard, ShardView)
FullParameters = Callable[..., Iterable[tuple[nn.Parameter, Tensor]]]


@dataclass(frozen=True, eq=False)
class _Tie:
    """Elements that two parameters have in common, and where they lie in each, flattened: (N,)."""

    params: tuple[nn.Parameter, nn.Parameter]
    places: tuple[Tensor, Tensor]

    def holds(self, values: Mapping[nn.Parameter, Tensor]) -> bool:
        """Whether the elements are equal in these full values."""
        one, other = (
            values[param].flatten()[places.to(values[param].device)]
            for param, places in zip(self.params, self.places, strict=True)
        )
        return torch.allclose(one, other.to(one.device), rtol=0, atol=0, equal_nan=True)


class Ties:
    """The parameters of a model that user code has tied by their memory.

    decoder.weight.data = encoder.weight.data.t()     on one device a step changes both from now on

    Ranks copy what is assigned. As long as both keep their values, or the assignment comes again
    before the next step, as a teacher's that is never trained, that is the same; else this says so.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._standing: list[_Tie] = []
        self._new: list[_Tie] = []

    @property
    def are_any(self) -> bool:
        """Whether any parameters are tied."""
        return bool(self._standing)

    def note_shown(self, shown: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Note which parameters have memory in common."""
        for (param, one), (other, two) in overlapping(shown):
            places = _common(_positions(one), _positions(two))
            self._new.append(_Tie((param, other), places))

    def note_view(self, param: nn.Parameter, other: nn.Parameter, positions: Tensor) -> None:
        """Note that a parameter was given a view of another one."""
        places = torch.arange(positions.numel())
        self._new.append(_Tie((param, other), (places, positions.flatten())))

    def renew(self, assigned: AbstractSet[nn.Parameter]) -> None:
        """Forget the earlier ties of parameters that were assigned; what was noted stands now."""
        if assigned and self._standing:
            self._standing = [
                tie for tie in self._standing if not any(one in assigned for one in tie.params)
            ]
        self._standing += self._new
        self._new = []

    def check(
        self, full_parameters: FullParameters, formats: Mapping[nn.Parameter, torch.dtype]
    ) -> None:
        """Raise ConfigError if tied parameters have come apart; each rank must call."""
        for tie in self._standing if self._model.training else ():
            if all(param.requires_grad for param in tie.params):
                raise self._refusal(*tie.params)  # an update would change each by itself
        tied = {param for tie in self._standing for param in tie.params}
        others = set(self._model.parameters()) - tied
        values = {
            param: value.to(formats.get(param, value.dtype))
            for param, value in full_parameters(everywhere=True, without=others)
        }
        for tie in self._standing:
            if all(param in values for param in tie.params) and not tie.holds(values):
                raise self._refusal(*tie.params)

    def _refusal(self, param: nn.Parameter, other: nn.Parameter) -> ConfigError:
        names = {one: name for name, one in self._model.named_parameters()}
        first, second = names.get(param, "of a copy"), names.get(other, "of a copy")
        return ConfigError(
            f"Rank {self._rank}: the parameters {first!r} and {second!r} were put on one memory, "
            f"as by a.data = b.data, where on one device a change of one changes both; the ranks "
            f"have a place for each, and update it by itself. Expected memory of their own, or "
            f"one parameter in both places. Assign a copy, a.data = b.data.clone(), or tie them "
            f"before the fit: a.weight = b.weight."
        )


def _positions(tensor: Tensor) -> Tensor:
    """Return where each element lies in the storage, in elements: shape (numel,)."""
    places: Tensor = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.flatten() + int(tensor.storage_offset())


def _common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the values that both have lie in the first, and in the second."""
    mine, theirs = torch.isin(one, other).nonzero().flatten(), torch.isin(other, one).nonzero()
    theirs = theirs.flatten()
    return mine[one[mine].argsort()], theirs[other[theirs].argsort()]


class Adoption:
    """Takes over what user code has assigned to the parameters of a model."""

    def __init__(
        self,
        model: nn.Module,
        flats: Sequence[FlatParameters],
        homes: Mapping[nn.Parameter, tuple[FlatParameters, int]],
        split: ModelSplit,
        weights: EqualWeights,
        rank: int,
        phases: Phases,
        *,
        may_reformat: bool,
        takes_newcomers: bool,
    ) -> None:
        self._flats, self._homes = flats, homes
        self._phases = phases
        has_hooks = any(flat.reshards for flat in flats) or not isinstance(split, Unsplit)
        fixed = has_hooks or takes_newcomers
        shapes = {param: flat.layout.slots[index].shape for param, (flat, index) in homes.items()}
        self.places = ParameterPlaces(
            model, rank, shapes, fixed_modules=fixed, takes_newcomers=takes_newcomers
        )
        self._split, self._weights = split, weights
        self.ties = Ties(model, rank)
        self._sources = phases.user_code.sources
        self._loaded = WeakSet[nn.Module]()
        self.other_formats: dict[nn.Parameter, Tensor] = {}
        self.may_reformat = may_reformat
        self._model, self._rank = model, rank
        self.on_replaced: list[Callable[[ReplacedParameter], None]] = []
        self.handles = [
            module.register_load_state_dict_pre_hook(_AssigningLoads(self._loaded))  # type: ignore[no-untyped-call]
            for module in hookable(model)
            if module._parameters
        ]
        for flat in flats:
            flat.on_assigned = self._adopt_data

    def adopt(self) -> None:
        """Take over values assigned to `param.data`, and those of parameters that were replaced."""
        if Phase.OVER in self._phases.open:  # the parameters are the module's alone
            return
        self._note_sources()
        self._adopt_data()
        for one in self.places.put_back(self._adopt_replaced):
            for hear in self.on_replaced if one.module not in self._loaded else ():
                hear(one)
        self._loaded.clear()

    @as_they_are
    def part_from_shards(self) -> None:
        """Let what user code has made of shards in modules be full; each rank must call."""
        exchange: Any = torch.utils.swap_tensors  # who holds the parameter goes on with it
        for param in self._model.parameters():
            if isinstance(param, _SHARDS):
                full = nn.Parameter(param.full_tensor(), param.requires_grad)
                exchange(param, full)
        for module in self._model.modules():
            made = {name: one for name, one in module._buffers.items() if isinstance(one, _SHARDS)}
            for name, one in made.items():
                module._buffers[name] = one.full_tensor()

    def check_ties(self, full_parameters: FullParameters) -> None:
        """Raise ConfigError if parameters on one memory have come apart; each rank must call."""
        if self.ties.are_any:
            formats = {param: flat.full.dtype for param, (flat, _) in self._homes.items()}
            self.ties.check(full_parameters, formats)

    @as_they_are
    def _adopt_data(self) -> None:
        """Copy all assigned values before any is written: they may lie in the buffers."""
        values = [flat.assigned() for flat in self._flats]
        self._note_ties(values)
        for flat, assigned in zip(self._flats, values, strict=True):
            if assigned:
                flat.adopt(assigned)
                self._weights.note_assigned()
                for index, value in assigned.items():
                    self._note_format(flat, index, value)

    def _note_format(self, flat: FlatParameters, index: int, value: Tensor) -> None:
        param = flat.params[index]
        self.other_formats.pop(param, None)
        if value.dtype in (flat.master_dtype, flat.full.dtype):
            return
        if not self.may_reformat:
            self.refuse_formats({param: value})
        self.other_formats[param] = value

    def refuse_formats(self, values: Mapping[nn.Parameter, Tensor]) -> NoReturn:
        """Raise ConfigError for parameters that cannot be laid out in another format any more."""
        known = {param: name for name, param in self._model.named_parameters()}
        for param, (flat, index) in self._homes.items():  # user code may have replaced it
            known[param] = flat.layout.slots[index].name
        names = ", ".join(f"{known[one]!r} ({value.dtype})" for one, value in values.items())
        raise ConfigError(
            f"Rank {self._rank}: {names} was given another number format, expected the one that "
            f"the ranks' buffers and the optimizer have it in. Convert layers in setup or "
            f"configure_model, where they keep their format under every strategy; shard_ddp, "
            f"zero1, zero2, zero3 and the model-parallel strategies also take it in on_fit_start "
            f"or on_train_start, before the first step. Or cast where it is used: weight.float()."
        )

    def _note_ties(self, values: Sequence[Mapping[int, Tensor]]) -> None:
        """Note which full parameters show the memory of others, before that is copied."""
        found = zip(self._flats, values, strict=True)
        assigned = {flat.params[index] for flat, indices in found for index in indices}
        if assigned:
            shown = dict(self._shown_full())
            self.ties.note_shown([*shown.items()])
            self.ties.renew(assigned & shown.keys())

    def _shown_full(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for flat in self._flats:
            for param, slot in zip(flat.params, flat.layout.slots, strict=True):
                if param.shape == slot.shape and not self._split.is_spread(param):
                    yield param, param.data

    def _note_sources(self) -> None:
        """Note which parameters in shards were given the shards of others, or views of them."""
        for param, source in self._sources.items():
            if source is not None:
                self.ties.note_view(param, source.param, source.positions)
        if self._sources:
            self.ties.renew(self._sources.keys())
        self._sources.clear()

    def _adopt_replaced(self, param: nn.Parameter, value: Tensor) -> None:
        if param in self._homes:
            flat, index = self._homes[param]
            full = value.full_tensor() if isinstance(value, ParameterShard) else value
            own = self._split.local(param, full)
            flat.adopt({index: own.to(flat.full.device, copy=True)})
            self._weights.note_assigned()
            self._note_format(flat, index, full.detach())


class _AssigningLoads:
    """Hook of a module that notes that `load_state_dict(assign=True)` exchanges its parameters."""

    def __init__(self, noted: WeakSet[nn.Module]) -> None:
        self._noted = noted

    def __call__(
        self, module: nn.Module, _: Any, __: str, metadata: Mapping[str, Any], *___: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            self._noted.add(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (note_nothing,)  # in copies of the module, pickled ones as well


def note_nothing(*_: Any) -> None:
    """Stand in for `_AssigningLoads` in copies of a module."""
