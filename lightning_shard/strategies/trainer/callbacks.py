"""Prepares Lightning's callbacks for a strategy that gives each rank shards of the parameters.

    ModelSummary                 counts what it sees: before the model is split
    BaseFinetuning               compares values with `torch.equal`; empty shards are all equal, so
                                 every rank would leave others out of the group that is added
    WeightAveraging, stochastic  average shards: see `weight_averaging`
    ModelPruning                 trains the first values along with the parameters that it has
                                 pointed at them; parameters have memory of their own here
    log_graph=True               rank 0 alone traces the module, which it has in full only before
                                 the model is split: so the graphs are drawn then

It touches the private names of Lightning's summaries, checked with lightning 2.6;
`tests/strategies/trainer/test_callbacks.py` fails when one changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelPruning, ModelSummary
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary, _tensor_has_shape
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as ShownSummary
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.torch_private import OF_ORIGINAL
from lightning_shard.errors import ConfigError
from lightning_shard.on_pytorch_lightning.mirror import PACKAGE, mirrored, original
from lightning_shard.strategies.trainer.weight_averaging import (
    averaging_callbacks,
    check_elementwise,
)

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
