"""Prepares Lightning's callbacks for a strategy that gives each rank shards of the parameters.

    ModelSummary                 counts what it sees: before the model is split
    BaseFinetuning               compares values with `torch.equal`; empty shards are all equal, so
                                 every rank would leave others out of the group that is added
    WeightAveraging, stochastic  average shards: see below
    ModelPruning                 trains the first values along with the parameters that it has
                                 pointed at them; parameters have memory of their own here
    log_graph=True               rank 0 alone traces the module, which it has in full only before
                                 the model is split: so the graphs are drawn then

It touches the private names of Lightning's summaries, checked with lightning 2.6;
`tests/strategies/trainer/test_callbacks.py` fails when one changes.

Lightning's weight averaging callbacks on shards: each rank averages what it holds.

The callbacks copy the full module before the strategy has split it, and then go through the
parameters of both side by side. So the copy's are cut here as the engine has cut the module's, and
where a callback goes through the module it is given the engine's shards, in the optimizer's format.
Afterwards every rank gets the full weights anew. A function of the user's that averages is tried
first, on a matrix and its shards: each element has to be averaged by itself.

Private names of Lightning are touched here alone; checked with lightning 2.6,
`tests/strategies/trainer/test_weight_averaging.py` fails when one changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary, _tensor_has_shape
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as ShownSummary
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import instead
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.torch_private import OF_ORIGINAL
from lightning_shard.errors import ConfigError
from lightning_shard.on_pytorch_lightning.mirror import PACKAGE, mirrored, original
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


_FULL_NUMEL = "_lightning_shard_full_numel"  # set on parameters that are parts


@contextmanager
def counted_full(shapes: Mapping[nn.Parameter, Sequence[int]]) -> Iterator[None]:
    """Let summaries that are made inside count parameters by these full shapes."""
    for param, shape in shapes.items():
        vars(param)[_FULL_NUMEL] = prod(shape)
    try:
        yield
    finally:
        for param in shapes:
            vars(param).pop(_FULL_NUMEL, None)


def count_full_parameters() -> None:
    """Have Lightning's summaries ask how large a parameter is that is a part."""
    _count_full(LayerSummary, "num_parameters", "_module")
    _count_full(ShownSummary, "total_parameters", "_model")
    _count_full(ShownSummary, "trainable_parameters", "_model", trained_only=True)


def _count_full(kind: type, name: str, of: str, *, trained_only: bool = False) -> None:
    def count(summary: Any) -> int:
        params = getattr(summary, of).parameters()
        return sum(_numel(one) for one in params if one.requires_grad or not trained_only)

    setattr(kind, name, property(count))


def _numel(param: nn.Parameter) -> int:
    full: int | None = vars(param).get(_FULL_NUMEL)
    if full is not None:
        return full
    return 0 if _tensor_has_shape(param) else param.numel()  # true of one without a shape


def draw_graphs(trainer: "pl.Trainer", module: "pl.LightningModule", device: torch.device) -> None:
    """Let the loggers of a fit draw the module while it is full, and not when the fit starts."""
    if not trainer.is_global_zero:  # loggers may be one for all ranks
        return
    for logger in trainer.loggers:
        draw = getattr(logger, "log_graph", None)
        if draw is None or getattr(type(logger), "log_graph", None) is Logger.log_graph:
            continue
        if all(param.device.type == device.type for param in module.parameters()):
            with isolate_rng():  # the other ranks draw no graph
                draw(module)
        else:
            rank_zero_warn(
                f"{type(logger).__name__} draws no graph: the parameters of "
                f"{type(module).__name__} come to the device only when they have been split."
            )
        _draw_no_graph(logger)


def _draw_no_graph(logger: Any) -> None:
    """Keep a graph that has been drawn from being drawn again when the fit starts."""
    own = {name: value for name, value in vars(logger).items() if name == "log_graph"}

    @rank_zero_only  # the ranks of one process share it
    def skip(*_: Any, **__: Any) -> None:
        del logger.log_graph
        vars(logger).update(own)

    logger.log_graph = skip


count_full_parameters()


_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def prepare_callbacks(
    callbacks: Sequence[Callback],
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    *,
    from_local: bool,
) -> None:
    """Run callbacks' work on full parameters before the parameters are sharded."""
    if from_local:
        compare_by_identity(callbacks)
        for callback in callbacks:
            if isinstance(callback, ModelSummary):
                type(callback).on_fit_start(callback, trainer, module)
                _skip_once(callback)
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            vars(callback)["_copy_param"] = partial(_follow, type(callback)._copy_param)


def check_callbacks(
    callbacks: Sequence[Callback], *, averages_shards: bool, splits_model: bool
) -> None:
    """Refuse callbacks that cannot work with a strategy."""
    for callback in callbacks:
        _check_root(callback)
        if splits_model and isinstance(callback, ModelPruning):
            raise ConfigError(
                f"{type(callback).__name__} takes parameters out of their modules during the fit, "
                f"where ranks have parts of the model; expected no pruning. Prune the fitted "
                f"model, or use strategy='zero3'."
            )
    if averages_shards:
        for average in averaging_callbacks(callbacks, fitting=True):
            check_elementwise(average)


def _follow(copied: Callable[..., None], new: nn.Module, old: nn.Module, name: str) -> None:
    """Copy a pruned parameter's first value, which is the parameter itself from now on."""
    copied(new, old, name)
    original = name + OF_ORIGINAL
    old._parameters[name] = getattr(new, original if hasattr(new, original) else name)


def _check_root(callback: Any) -> None:
    """Refuse a callback of the root of Lightning that is not the Trainer's."""
    roots = {_root_of(kind.__module__) for kind in type(callback).__mro__} - {""}
    if isinstance(callback, Callback) or not roots:
        return
    home = original(type(callback).__module__)
    if home.startswith(PACKAGE):
        package = home.rpartition(".")[0]
        is_ours = original(__name__) == __name__
        advice = f"import it from {package if is_ours else mirrored(package)}"
    elif _root_of(home):
        advice = f"import it from {pl.__name__}.callbacks"
    else:
        advice = f"derive it from {pl.__name__}.Callback"
    raise ConfigError(
        f"The callback {type(callback).__name__} is of {roots.pop()}, but the Trainer is of "
        f"{pl.__name__}; expected callbacks of the same package: {advice}."
    )


def _root_of(module: str) -> str:
    return next((root for root in _LIGHTNING if module.startswith(f"{root}.")), "")


def _skip_once(summary: ModelSummary) -> None:
    """Keep a summary that has been shown from being shown again when the fit starts."""

    def skip(*_: Any) -> None:
        del summary.on_fit_start

    summary.on_fit_start = skip  # type: ignore[method-assign, assignment]


def compare_by_identity(callbacks: Iterable[Callback]) -> None:
    """Let finetuning callbacks, from now on, add parameters by identity."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            callback.unfreeze_and_add_param_group = _unfreeze_and_add  # type: ignore[method-assign]


def _unfreeze_and_add(
    modules: Any,
    optimizer: Optimizer,
    lr: float | None = None,
    initial_denom_lr: float = 10.0,
    train_bn: bool = True,
) -> None:
    """Unfreeze modules and add a group, as `unfreeze_and_add_param_group`, but by identity."""
    BaseFinetuning.make_trainable(modules)
    known = {param for group in optimizer.param_groups for param in group["params"]}
    trainable = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
    params = [param for param in trainable if param not in known]
    rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
    if params:
        optimizer.add_param_group({"params": params, "lr": rate})
