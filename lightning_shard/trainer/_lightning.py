"""The private names of Lightning that this room and the strategies touch.

Checked with lightning 2.6; `tests/strategies/tensor_parallel/test_batches.py`,
`tests/trainer/test_measured_stages.py`, `tests/trainer/test_lightning_loops.py` and
`tests/strategies/data_parallel/test_compile.py` fail when one changes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as seed_workers
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as with_indices
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors import data_connector as data_connector_module
from lightning.pytorch.trainer.connectors.data_connector import (
    _request_dataloader as request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage

__all__ = [
    "accept_compiled_modules",
    "after_training_epochs",
    "around_validation",
    "assign_under_indices",
    "before_training_ends",
    "forget_sigterm_handler",
    "handle_sigterm",
    "is_assigned_by_trainer",
    "layer_sync",
    "prepare_dataloader",
    "request_dataloader",
    "runners_of",
    "sampler_of_rank",
    "seed_workers",
    "share_class_wrapping",
    "training_data",
    "with_indices",
    "without_samplers_of_ranks",
    "without_sigterm_broadcast",
]


def training_data(trainer: "pl.Trainer") -> Any:
    """Return the loaders of a fit, made anew."""
    return request_dataloader(trainer.fit_loop._data_source)


def layer_sync(strategy: ParallelStrategy) -> LayerSync | None:
    """Return a strategy's synchronization of batch norms; None where the user asks for none."""
    return strategy._layer_sync


def runners_of(module: "pl.LightningModule") -> tuple[Any, ...]:
    """Return the Trainer, or the Fabric, that a module is attached to."""
    return tuple(one for one in (module._trainer, module._fabric) if one is not None)


def prepare_dataloader(trainer: "pl.Trainer") -> tuple[Any, str, Callable[..., Any]]:
    """Return the method that gives a loader its rank's sampler: its owner, name and itself.

    The method takes the loader, whether to shuffle, and the running stage.
    """
    connector = trainer._data_connector
    return connector, "_prepare_dataloader", connector._prepare_dataloader


def is_assigned_by_trainer(trainer: "pl.Trainer", dataloader: Any) -> bool:
    """Whether the trainer would give this loader a sampler of a rank."""
    needs_sampler: bool = trainer._data_connector._requires_distributed_sampler(dataloader)
    return needs_sampler


def sampler_of_rank(
    trainer: "pl.Trainer", dataloader: Any, *, shuffle: bool, mode: RunningStage
) -> Any:
    """Return the sampler with which the trainer would make this loader anew."""
    return trainer._data_connector._resolve_sampler(dataloader, shuffle=shuffle, mode=mode)


@contextmanager
def without_samplers_of_ranks(trainer: "pl.Trainer") -> Iterator[None]:
    """Let the trainer prepare loaders inside as on one device."""
    connector = trainer._data_connector
    with patch.object(connector, "_requires_distributed_sampler", lambda _: False):
        yield


def assign_under_indices(
    tracking: Any, is_assigned: Callable[[Any], bool], assign: Callable[[Any], Any]
) -> None:
    """Assign the ranks the batches whose indices Lightning notes.

    Args:
        tracking: The batch sampler of a loader that was prepared for predictions.
        is_assigned: Returns whether a batch sampler stays as it is.
        assign: Returns a rank's batches of a batch sampler.
    """
    batches = tracking._batch_sampler
    if not is_assigned(batches):
        tracking._batch_sampler = assign(batches)


def accept_compiled_modules(strategies: type[Strategy]) -> None:
    """Let the Trainer take the result of `torch.compile(module)` under these strategies, too.

    Lightning allows that for a fixed list of its own strategies, which cannot be extended.
    """
    owner: Any = trainer_module
    check = owner._verify_strategy_supports_compile

    def check_others(model: "pl.LightningModule", strategy: Strategy) -> None:
        if not isinstance(strategy, strategies):
            check(model, strategy)

    owner._verify_strategy_supports_compile = check_others


class _SharedContexts:
    """Contexts that stay open from the first entry to the last exit, whoever entered first.

    Args:
        make: Makes the context from the arguments of an entry.
    """

    def __init__(self, make: Callable[..., AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: dict[tuple[Any, ...], tuple[int, ExitStack]] = {}

    @contextmanager
    def __call__(self, *args: Any) -> Iterator[None]:
        num_inside, stack = self._open.get(args) or (0, ExitStack())
        if num_inside == 0:
            stack.enter_context(self._make(*args))
        self._open[args] = num_inside + 1, stack
        try:
            yield
        finally:
            num_inside, stack = self._open.pop(args)
            if num_inside > 1:
                self._open[args] = num_inside - 1, stack
            else:
                stack.close()


def share_class_wrapping() -> None:
    """Let ranks of one process be inside their hooks for loaders at the same time.

    In them Lightning wraps constructors of torch's classes, and each rank would take another's
    wrapper for the original.
    """
    owner: Any = data_connector_module
    owner._replace_dunder_methods = _SharedContexts(owner._replace_dunder_methods)


@contextmanager
def without_sigterm_broadcast(trainer: "pl.Trainer") -> Iterator[None]:
    """Keep a fit's ranks inside from asking rank 0 before each batch whether it got SIGTERM."""
    loop = trainer.fit_loop.epoch_loop
    with patch.object(loop, "_broadcast_sigterm_tensor", lambda: None):
        yield


@contextmanager
def around_validation(
    trainer: "pl.Trainer", inside: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Let each validation of a fit run in a context, with all hooks that belong to it."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    run = loop.run

    def run_inside() -> Any:
        with inside():
            return run()

    with patch.object(loop, "run", run_inside):
        yield


@contextmanager
def after_training_epochs(trainer: "pl.Trainer", then: Callable[[], None]) -> Iterator[None]:
    """Call `then` after the last batch of each epoch, before the hooks of its end."""
    loop = trainer.fit_loop.epoch_loop
    run = loop.run

    def run_then(data_fetcher: Any) -> None:
        run(data_fetcher)
        then()

    with patch.object(loop, "run", run_then):
        yield


@contextmanager
def before_training_ends(trainer: "pl.Trainer", first: Callable[[], None]) -> Iterator[None]:
    """Call `first` before the hooks `on_train_end`."""
    loop = trainer.fit_loop
    on_run_end = loop.on_run_end

    def first_then() -> None:
        first()
        on_run_end()

    with patch.object(loop, "on_run_end", first_then):
        yield


def handle_sigterm(trainer: "pl.Trainer", handler: Callable[[int, FrameType | None], None]) -> None:
    """Have `handler` called on SIGTERM in the run; call before Lightning registers its own."""
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = handler


def forget_sigterm_handler(module: "pl.LightningModule") -> None:
    """Undo `handle_sigterm`, for the next run."""
    if module._trainer is not None:
        vars(module.trainer._signal_connector).pop("_sigterm_notifier_fn", None)
