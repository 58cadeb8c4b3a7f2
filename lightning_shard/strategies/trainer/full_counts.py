"""What is shown of a model is full where a rank has a part of each parameter, or none.

A summary that is made in a hook counts what it sees. It touches the private names of Lightning's
summaries, checked with lightning 2.6; `tests/strategies/trainer/test_full_counts.py` fails when
one changes.

Of the graphs that loggers draw (`TensorBoardLogger(log_graph=True)`) Lightning has rank 0 alone
trace the module when the fit starts. By then a rank has only parts of the parameters, and the
forward needs the other ranks. So the graphs are drawn before the model is split, where rank 0 has
all of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_summary.model_summary import (
    LayerSummary,
    ModelSummary,
    _tensor_has_shape,
)
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import nn

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
    _count_full(ModelSummary, "total_parameters", "_model")
    _count_full(ModelSummary, "trainable_parameters", "_model", trained_only=True)


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
    """Let the loggers of a fit draw the module while it is full, and not when the fit starts.

    Args:
        trainer: The trainer of that fit.
        module: The module, which is still full.
        device: Device on which inputs come.
    """
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
        _skip_once(logger)


def _skip_once(logger: Any) -> None:
    """Keep a graph that has been drawn from being drawn again when the fit starts."""
    own = {name: value for name, value in vars(logger).items() if name == "log_graph"}

    @rank_zero_only  # the ranks of one process share it
    def skip(*_: Any, **__: Any) -> None:
        del logger.log_graph
        vars(logger).update(own)

    logger.log_graph = skip


count_full_parameters()
