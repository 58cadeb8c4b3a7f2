"""The graphs of a model that loggers draw (`TensorBoardLogger(log_graph=True)`).

Lightning has rank 0 alone trace the module when the fit starts. By then a rank has only parts of
the parameters, and the forward needs the other ranks. So the graphs are drawn before the model is
split, where rank 0 has all of it.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn


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
