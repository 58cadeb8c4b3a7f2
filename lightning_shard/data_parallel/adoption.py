"""Takes values over that user code has assigned to parameters, before anything reads our buffers.

flats ──assigned()──> values ──adopt──> buffers      and the weights are known to have changed
places ──put_back──> replaced parameters ──┘   and optimizers hear of them

An optimizer on one device goes on with the parameter that it has: what user code puts in its place
is trained only if it gives it to the optimizer. `load_state_dict(assign=True)` loads values, which
are trained on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor, nn

from lightning_shard.data_parallel.assigned import ParameterPlaces, ReplacedParameter
from lightning_shard.data_parallel.equal_weights import EqualWeights
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.parameter_shard import ParameterShard
from lightning_shard.data_parallel.scripted import hookable
from lightning_shard.data_parallel.sharded_parameter import Source, as_they_are
from lightning_shard.data_parallel.ties import FullParameters, Ties
from lightning_shard.errors import ConfigError


class Adoption:
    """Takes over what user code has assigned to the parameters of a model.

    Args:
        model: The model, whose modules hold the parameters.
        flats: The buffers of the parameters, which ask for it when they notice one.
        homes: Buffer of each parameter, and its index there.
        split: How the model is split over other ranks.
        weights: Is told that ranks may have other weights now.
        rank: Global rank of this process, for error messages.

    Attributes:
        ties: Parameters that user code has put on one memory.
        sources: What was assigned to parameters in shards, as `UserCode` has it.
        handles: Handles of hooks in the model, which whoever makes this removes.
        on_replaced: Called with each parameter that was replaced, once it is in its place again.
        other_formats: Values that user code has given parameters in another format than the
            buffers have, by the parameter, as assigned. They are taken over rounded.
        may_reformat: Whether parameters can be laid out anew in such formats; else they are
            refused.
    """

    def __init__(
        self,
        model: nn.Module,
        flats: Sequence[FlatParameters],
        homes: Mapping[nn.Parameter, tuple[FlatParameters, int]],
        split: ModelSplit,
        weights: EqualWeights,
        rank: int,
    ) -> None:
        self._flats, self._homes = flats, homes
        self._is_over = False
        has_hooks = any(flat.reshards for flat in flats) or not isinstance(split, Unsplit)
        self._places = ParameterPlaces(model, rank, fixed_modules=has_hooks)
        self._split, self._weights = split, weights
        self.ties = Ties(model, rank)
        self.sources: dict[nn.Parameter, Source | None] = {}
        self._loaded = WeakSet[nn.Module]()
        self.other_formats: dict[nn.Parameter, Tensor] = {}
        self.may_reformat = False
        self._model, self._rank = model, rank
        self.on_replaced: list[Callable[[ReplacedParameter], None]] = []
        self.handles = [
            module.register_load_state_dict_pre_hook(_AssigningLoads(self._loaded))  # type: ignore[no-untyped-call]
            for module in hookable(model)
            if module._parameters
        ]
        for flat in flats:
            flat.on_assigned = self._adopt_data

    def end(self) -> None:
        """Take nothing over any more: the parameters are the module's alone."""
        self._is_over = True

    def adopt(self) -> None:
        """Take over values assigned to `param.data`, and those of parameters that were replaced.

        Raises:
            ConfigError: An assigned value cannot be the parameter's.
        """
        if self._is_over:
            return
        self._note_sources()
        self._adopt_data()
        for one in self._places.put_back(self._adopt_replaced):
            for hear in self.on_replaced if one.module not in self._loaded else ():
                hear(one)
        self._loaded.clear()

    def check_ties(self, full_parameters: FullParameters) -> None:
        """Raise ConfigError if parameters on one memory have come apart; each rank must call.

        Args:
            full_parameters: Brings parameters together, as the engine's does.
        """
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
        for param, source in self.sources.items():
            if source is not None:
                self.ties.note_view(param, source.param, source.positions)
        if self.sources:
            self.ties.renew(self.sources.keys())
        self.sources.clear()

    def _adopt_replaced(self, param: nn.Parameter, value: Tensor) -> None:
        if param in self._homes:
            flat, index = self._homes[param]
            full = value.full_tensor() if isinstance(value, ParameterShard) else value
            own = self._split.local(param, full)
            flat.adopt({index: own.to(flat.full.device, copy=True)})
            self._weights.note_assigned()
            self._note_format(flat, index, full.detach())


class _AssigningLoads:
    """Hook of a module that notes that `load_state_dict(assign=True)` exchanges its parameters.

    Args:
        noted: Modules where it has been called.
    """

    def __init__(self, noted: WeakSet[nn.Module]) -> None:
        self._noted = noted

    def __call__(
        self, module: nn.Module, _: Any, __: str, metadata: Mapping[str, Any], *___: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            self._noted.add(module)

    def __reduce__(self) -> str:
        return "note_nothing"  # in copies of the module, pickled ones as well


def note_nothing(*_: Any) -> None:
    """Stand in for `_AssigningLoads` in copies of a module."""
