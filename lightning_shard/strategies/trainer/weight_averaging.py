"""Lightning's weight averaging callbacks on shards: each rank averages what it holds.

The callbacks copy the full module before the strategy has split it, and then go through the
parameters of both side by side. So the copy's are cut here as the engine has cut the module's, and
where a callback goes through the module it is given the engine's shards, in the optimizer's format.
Afterwards every rank gets the full weights anew. A function of the user's that averages is tried
first, on a matrix and its shards: each element has to be averaged by itself.

Private names of Lightning are touched here alone; checked with lightning 2.6,
`tests/strategies/trainer/test_weight_averaging.py` fails when one changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import instead
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.errors import ConfigError
from lightning_shard.optim.elementwise import why_different

Averaging = WeightAveraging | StochasticWeightAveraging


@dataclass(frozen=True)
class _Method:
    """A method of a callback that goes through the module."""

    name: str
    place: int
    writes: bool


_OF_AVERAGE = (_Method("update_parameters", 0, writes=False),)
_OF_WEIGHT_AVERAGING = (
    _Method("_swap_models", 0, writes=True),
    _Method("_copy_average_to_current", 0, writes=True),
    _Method("on_load_checkpoint", 1, writes=True),  # of a tuner, in the middle of a run
)
_OF_STOCHASTIC = (
    _Method("update_parameters", 1, writes=False),
    _Method("transfer_weights", 1, writes=True),
)


def averaging_callbacks(callbacks: Iterable[Callback], *, fitting: bool) -> list[Averaging]:
    """Return the callbacks that will use an average that they hold."""
    used = Averaging if fitting else WeightAveraging  # it swaps an earlier fit's to validate
    return [one for one in callbacks if isinstance(one, used) and one._average_model is not None]


def check_elementwise(callback: Averaging) -> None:
    """Raise ConfigError if a callback's average of shards is not the average in shards."""
    reason = why_not_elementwise(partial(_averaged, callback))
    if reason is not None:
        raise ConfigError(
            f"{type(callback).__name__} has an averaging function of its own, which does not treat "
            f"each element by itself ({reason}), but each rank has shards of the weights only. Use "
            f"strategy='shard_ddp', or average element by element."
        )


class AverageOfShards:
    """Cuts a callback's average, of rank 0's values, until `restore`; each rank must make one."""

    def __init__(
        self,
        callback: Averaging,
        engine: DataParallelEngine,
        world: Collectives,
        load: Callable[[Mapping[str, Any]], None],
        share_buffers: Callable[[], object],
    ) -> None:
        self._callback, self._engine, self._share_buffers = callback, engine, share_buffers
        average = callback._average_model
        assert average is not None
        self._copy: nn.Module = average.module if isinstance(average, AveragedModel) else average
        self._shapes = {copy: tuple(copy.shape) for copy in self._copy.parameters()}
        self._copies = self._paired()
        for copy in self._copy.buffers():
            copy.data.copy_(self._same(copy.data, world))
        for param, copy in self._copies.items():
            copy.data = self._shard(param, self._same(copy.data, world)).to(copy.device)
        self._hooks = self._hook()
        self._replaced = ExitStack()
        self._shards = _Shards(engine, load)
        self._replace(average, _OF_AVERAGE if average is not self._copy else ())
        self._replace(callback, _OF_WEIGHT_AVERAGING if self._is_plain else _OF_STOCHASTIC)

    @property
    def _is_plain(self) -> bool:
        return isinstance(self._callback, WeightAveraging)

    def _paired(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the copy of each parameter of the module."""
        self.check_paired()
        return dict(zip(self._engine.model.parameters(), self._copy.parameters(), strict=True))

    def check_paired(self) -> None:
        """Refuse a module that has other parameters than the callback has copied."""
        params = list(self._engine.model.parameters())
        if [self._full_shape(param) for param in params] != list(self._shapes.values()):
            raise ConfigError(
                f"{type(self._callback).__name__} has copied {len(self._shapes)} parameters of the "
                f"module, but it has other ones now, {len(params)}. Make all of them in __init__."
            )

    def _full_shape(self, param: nn.Parameter) -> tuple[int, ...]:
        shape = self._engine.split.full_shapes.get(param)
        if shape is None and self._engine.knows(param):
            flat, index = self._engine.owner(param)
            return flat.layout.slots[index].shape
        return tuple(param.shape if shape is None else shape)

    def _same(self, value: Tensor, world: Collectives) -> Tensor:
        """Return rank 0's value, on the engine's device."""
        same = value.to(self._engine.device).contiguous()
        if same.numel():
            world.broadcast(same, src=0).wait()
        return same

    def _shard(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of the full shape of `param`."""
        if not self._engine.split.is_here(param):
            return full.new_empty(0)
        part = self._engine.split.local(param, full)
        flat, index = self._engine.owner(param)
        if flat.stage > 0:
            shard_slice = flat.layout.shard_slice(flat.layout.slots[index], flat.shard_index)
            part = part.flatten()[shard_slice.param_offset : shard_slice.param_stop]
        return part.to(flat.master.device, copy=True)

    # Closures, not bound methods: torch marks hooks, and a copy of a module copies methods' owners.
    def _hook(self) -> list[RemovableHandle]:
        def saved(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            self._join_saved(state, prefix)

        def loaded(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            self._cut_loaded(state, prefix)

        return [
            self._copy.register_state_dict_post_hook(saved),  # type: ignore[no-untyped-call]
            self._copy.register_load_state_dict_pre_hook(loaded),  # type: ignore[no-untyped-call]
        ]

    def _replace(self, owner: object, methods: Sequence[_Method]) -> None:
        for method in methods:
            on_shards = instead(owner, method.name, self._on_shards(method))
            self._replaced.enter_context(on_shards)

    def _on_shards(self, method: _Method) -> Callable[..., Any]:
        """Return a method that is given the shards in place of the module."""
        place = method.place

        @torch.no_grad()
        def called(call: Callable[..., Any], *args: Any) -> Any:
            self._settle()
            result = call(*args[:place], self._shards, *args[place + 1 :])
            if method.writes:
                self._publish()
            return result

        return called

    def _settle(self) -> None:
        """Carry user code's changes of full parameters over to the shards."""
        self._engine.adopt_assigned()
        if self._engine.options.stage == 3:
            for unit in self._engine.units:
                unit.reshard(edited=True)
        for flat in self._engine.flats:
            if self._engine.options.stage < 3:
                flat.take_in_edits()
            flat.settle()

    def _publish(self) -> None:
        """Bring full parameters up to date with the shards; stage 3 gathers when it needs them."""
        for flat in self._engine.flats:
            flat.send_up()
        if self._engine.options.stage == 3:
            return
        for handle in [flat.begin_unshard() for flat in self._engine.flats]:
            if handle is not None:
                handle.wait()

    def _join_saved(self, state: dict[str, Any], prefix: str) -> None:
        """Put full tensors into the copy's `state_dict` on the rank that saves, else none."""
        self._gather_buffers()
        full = {}
        for copy, value in self._full():
            if self._engine.is_first:
                full[copy] = value.to("cpu", copy=True)
        for name, copy in self._copy.named_parameters(remove_duplicate=False):
            if prefix + name in state and self._engine.is_first:
                state[prefix + name] = full[copy]
            else:
                state.pop(prefix + name, None)

    def _cut_loaded(self, state: dict[str, Any], prefix: str) -> None:
        """Cut full tensors that are about to be loaded into the copy."""
        params = {copy: param for param, copy in self._copies.items()}
        for name, copy in self._copy.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == self._shapes[copy]:
                state[prefix + name] = self._shard(params[copy], value)

    @torch.no_grad()
    def _full(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the copy's parameters and their full values; each rank must call."""
        flat: FlatParameters | None = None
        come: list[Tensor] = []
        for param, copy in self._copies.items():
            value = copy.data.to(self._engine.device)
            if self._engine.split.is_here(param):
                home, index = self._engine.owner(param)
                if home is not flat:
                    flat, come = home, self._joined(home, copy.dtype)
                value = come[index]
            yield copy, self._engine.split.full(param, value)

    def _joined(self, flat: FlatParameters, dtype: torch.dtype) -> list[Tensor]:
        """Bring the copies of a buffer's parameters together."""
        shard = torch.zeros_like(flat.shard, dtype=dtype)
        for param, view in zip(flat.params, flat.shard_views(shard), strict=True):
            view.copy_(self._copies[param].data)
        return flat.gather_shards(shard)

    def _gather_buffers(self) -> None:
        """Give rank 0 the averages of buffers that other stages of a pipeline compute."""
        if not self._engine.split.groups_of_layers or next(self._copy.buffers(), None) is None:
            return
        self._swap_buffers()
        self._share_buffers()
        self._swap_buffers()

    @torch.no_grad()
    def _swap_buffers(self) -> None:
        for own, copy in zip(self._engine.model.buffers(), self._copy.buffers(), strict=True):
            kept = copy.clone()
            copy.copy_(own)
            own.copy_(kept)

    def restore(self, *, full: bool) -> None:
        """Give the callback its methods, and with `full`, by all ranks, the full average."""
        if full:
            self._gather_buffers()
            joined = [(copy, value.to(copy.device, copy=True)) for copy, value in self._full()]
            for copy, value in joined:
                copy.data = value
        elif any(copy.shape != shape for copy, shape in self._shapes.items()):
            self._callback._average_model = None
        for hook in self._hooks:
            hook.remove()
        self._replaced.close()


class _Shards:
    """Stands in for the module in a callback: this rank's shards."""

    def __init__(
        self, engine: DataParallelEngine, load: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._engine = engine
        self.load_state_dict = load

    def parameters(self) -> Iterator[Tensor]:
        """Yield this rank's shard of each parameter; empty where it has none."""
        for param in self._engine.model.parameters():
            if self._engine.split.is_here(param):
                flat, index = self._engine.owner(param)
                yield flat.master_views[index]
            else:
                yield param.data

    def buffers(self) -> Iterator[Tensor]:
        """Yield the module's buffers."""
        return self._engine.model.buffers()


def _averaged(
    callback: Averaging, averages: Sequence[Tensor], currents: Sequence[Tensor]
) -> list[Tensor]:
    """Average tensors as a callback does after its first update."""
    count = torch.tensor(1)
    if isinstance(callback, StochasticWeightAveraging):
        one = callback._avg_fn
    else:
        average = callback._average_model
        assert average is not None
        if average.multi_avg_fn is not None:
            results = [value.clone() for value in averages]
            average.multi_avg_fn(results, list(currents), count)
            return results
        if average.avg_fn is None:  # torch's own mean
            return list(averages)
        one = average.avg_fn
    return [one(old, new, count) for old, new in zip(averages, currents, strict=True)]


_SHAPE = (4, 6)
_CUT = 10  # inside a row

Averaged = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def why_not_elementwise(averaged: Averaged) -> str | None:
    """Return in words how shards come out differently than the matrix; None when they do not."""
    generator = torch.Generator().manual_seed(0)
    average, current = torch.randn((2, *_SHAPE), generator=generator).unbind()

    def results() -> list[list[Tensor]]:
        shards = averaged(_in_shards(average), _in_shards(current))
        return [averaged([average], [current]), shards]

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return why_different(results)


def _in_shards(matrix: Tensor) -> list[Tensor]:
    """Cut a matrix into 1-D shards, of which one has no elements."""
    flat = matrix.flatten()
    return [flat[:0], flat[:_CUT], flat[_CUT:]]
