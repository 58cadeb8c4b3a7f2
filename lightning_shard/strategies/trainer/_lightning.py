"""The private names of Lightning and torchmetrics that this room and the strategies touch.

Checked with lightning 2.6 and torchmetrics 1.9; tests under `tests/strategies` and
`tests/checkpoint` that go through a Trainer fail when one changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_shard.core.extensions import around, instead

request_dataloader = _request_dataloader
seed_workers = _auto_add_worker_init_fn
with_indices = _IndexBatchSamplerWrapper


def training_data(trainer: "pl.Trainer") -> Any:
    """Return the loaders of a fit, made anew."""
    return request_dataloader(trainer.fit_loop._data_source)


def layer_sync(strategy: ParallelStrategy) -> LayerSync | None:
    """Return a strategy's synchronization of batch norms; None where the user asks for none."""
    return strategy._layer_sync


def connect(strategy: Any, module: "pl.LightningModule", sync: LayerSync | None) -> None:
    """Give a strategy that is only asked a module, and what synchronizes its batch norms."""
    strategy._lightning_module, strategy._layer_sync = module, sync


def preparing_dataloaders(
    trainer: "pl.Trainer", call: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Let `call` give loaders samplers inside: by Lightning's method, and what that is given."""
    return instead(trainer._data_connector, "_prepare_dataloader", call)


def is_assigned_by_trainer(trainer: "pl.Trainer", dataloader: Any) -> bool:
    """Whether the trainer would give this loader a sampler of a rank."""
    needs_sampler: bool = trainer._data_connector._requires_distributed_sampler(dataloader)
    return needs_sampler


def sampler_of_rank(
    trainer: "pl.Trainer", dataloader: Any, *, shuffle: bool, mode: RunningStage
) -> Any:
    """Return the sampler with which the trainer would make this loader anew."""
    return trainer._data_connector._resolve_sampler(dataloader, shuffle=shuffle, mode=mode)


def without_samplers_of_ranks(trainer: "pl.Trainer") -> AbstractContextManager[None]:
    """Let the trainer prepare loaders inside as on one device."""
    return instead(trainer._data_connector, "_requires_distributed_sampler", lambda *_: False)


def assign_under_indices(
    tracking: Any, is_assigned: Callable[[Any], bool], assign: Callable[[Any], Any]
) -> None:
    """Assign the ranks the batches whose indices Lightning notes."""
    batches = tracking._batch_sampler
    if not is_assigned(batches):
        tracking._batch_sampler = assign(batches)


def noted_batches(tracking: Any) -> Any:
    """Return the batch sampler whose indices Lightning notes, or what is given itself."""
    return getattr(tracking, "_batch_sampler", tracking)


def prediction_loaders(trainer: "pl.Trainer") -> list[Any]:
    """Return the loaders of a prediction, each by itself."""
    combined = trainer.predict_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def accept_compiled_modules(strategies: type[Strategy]) -> None:
    """Let the Trainer take a compiled module, though Lightning has a fixed list for it."""
    owner: Any = trainer_module
    check = owner._verify_strategy_supports_compile

    def check_others(model: "pl.LightningModule", strategy: Strategy) -> None:
        if not isinstance(strategy, strategies):
            check(model, strategy)

    owner._verify_strategy_supports_compile = check_others


def without_sigterm_broadcast(trainer: "pl.Trainer") -> AbstractContextManager[None]:
    """Keep ranks inside from asking rank 0 before each batch whether it got SIGTERM."""
    return instead(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda _: None)


def around_sigterm_broadcast(
    trainer: "pl.Trainer", inside: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Let ranks ask rank 0 whether it got SIGTERM within a context, where they ask at all."""
    return around(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", inside)


def around_validation(
    trainer: "pl.Trainer", inside: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Let each validation of a fit run in a context, with all hooks that belong to it."""
    return around(trainer.fit_loop.epoch_loop.val_loop, "run", inside)


def _with_calls(
    owner: Any,
    name: str,
    *,
    first: Callable[[], None] = lambda: None,
    then: Callable[[], None] = lambda: None,
) -> AbstractContextManager[None]:
    """Let a method that returns nothing come after another call, or before one."""

    def called(method: Callable[..., None], *args: Any) -> None:
        first()
        method(*args)
        then()

    return instead(owner, name, called)


def after_training_epochs(
    trainer: "pl.Trainer", then: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `then` after the last batch of each epoch, before the hooks of its end."""
    return _with_calls(trainer.fit_loop.epoch_loop, "run", then=then)


def after_optimizer_steps(
    trainer: "pl.Trainer", then: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `then` after each step that automatic optimization counts, taken or left out."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    return _with_calls(loop, "_optimizer_step", then=then)


def before_batches(
    trainer: "pl.Trainer", first: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `first` before a fit fetches each batch that it trains on."""
    loop = trainer.fit_loop.epoch_loop

    def first_then(_: Any, data_fetcher: Any) -> None:
        first()
        type(loop).advance(loop, data_fetcher)  # of the class that it has by then

    return instead(loop, "advance", first_then)


def before_training_ends(
    trainer: "pl.Trainer", first: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `first` before the hooks `on_train_end`."""
    return _with_calls(trainer.fit_loop, "on_run_end", first=first)


def before_making_iterators(
    trainer: "pl.Trainer", first: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `first` each time before a fit makes iterators of loaders that it has asked for."""
    return _with_calls(trainer.fit_loop, "_load_combined_loader_states", first=first)


def training_loaders(trainer: "pl.Trainer") -> list[Any]:
    """Return the loaders of a fit, each by itself."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def iterators_of(fetcher: Any) -> Any:
    """Return what the fetcher's loaders were iterated by last; the combined loader is the same."""
    return fetcher.combined_loader._iterator


def loader_states(trainer: "pl.Trainer") -> list[Any]:
    """Return the states of this rank's training loaders that have one; Lightning saves rank 0's."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined._state_dicts()


def load_loader_states(trainer: "pl.Trainer", states: Sequence[Any]) -> None:
    """Have these states loaded, not a checkpoint's, before iterators are made."""
    if states and training_loaders(trainer):
        trainer.fit_loop._combined_loader = None
    trainer.fit_loop._combined_loader_states_to_load = list(states)


def end_saved_epoch(trainer: "pl.Trainer") -> None:
    """End the epoch in whose last hooks a checkpoint was saved that a fit is resumed from.

    After `on_train_epoch_end` Lightning 2.6 would take the epoch up again where steps limit the
    fit, and repeat a batch. After the last batch's `on_train_batch_end` it has counted the epoch as
    done, but would not begin the next one: without its hooks, and without counting it, so that a
    second checkpoint of an epoch's last batch would give this epoch's samples again.
    """
    loop = trainer.fit_loop
    within = loop.epoch_loop
    if loop.restarted_on_epoch_end:
        loop.epoch_progress.increment_completed()
    elif (
        loop.restarted_mid_epoch
        and within.restarted_on_train_batch_end
        and within.batch_progress.is_last_batch
    ):
        within.batch_progress.increment_completed()
        within._batches_that_stepped += 1
    else:
        return
    for one in (loop, within, within.val_loop, within.automatic_optimization):
        one._restarting = False
        one.reset_restart_stage()


def count_batches_anew(trainer: "pl.Trainer", num_batches: int) -> None:
    """Let a fit that is resumed within an epoch have been given so many batches of it."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    left = current.ready - current.completed  # the one in whose hook it was saved
    current.ready = current.started = current.processed = num_batches
    current.completed = num_batches - left
    progress.is_last_batch = num_batches >= trainer.num_training_batches


def skip_batches(fetcher: Any, num_batches: int) -> None:
    """Fetch so many batches of data that has just begun, which the loop counts, and drop them."""
    ahead = bool(getattr(fetcher, "batches", ()))
    with suppress(StopIteration):
        for _ in range(num_batches):
            next(fetcher if ahead else fetcher.iterator)
    fetcher.fetched = len(getattr(fetcher, "batches", ()))


@contextmanager
def knowing_saves_in_flight(
    callback: ModelCheckpoint,
    will_exist: Callable[[str, bool], bool],
    once_complete: Callable[[Callable[[], None]], bool],
) -> Iterator[None]:
    """Let a callback choose names, and make links, as if what is in flight were complete."""

    def file_exists(exists: Any, filepath: str, trainer: "pl.Trainer") -> bool:
        return will_exist(filepath, exists(filepath, trainer))

    def link_checkpoint(link: Any, trainer: "pl.Trainer", filepath: str, linkpath: str) -> None:
        alone: Any = SimpleNamespace(
            is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None)
        )
        if not once_complete(partial(link, alone, filepath, linkpath)):
            link(trainer, filepath, linkpath)

    with (
        instead(callback, "file_exists", file_exists),
        instead(callback, "_link_checkpoint", link_checkpoint),
    ):
        yield


def handle_sigterm(trainer: "pl.Trainer", handler: Callable[[int, FrameType | None], None]) -> None:
    """Have `handler` called on SIGTERM in the run; call before Lightning registers its own."""
    connector: Any = trainer._signal_connector
    # As a function, which a copy of the trainer shares: handlers hold threads and groups.
    connector._sigterm_notifier_fn = lambda signum, frame: handler(signum, frame)


def handle_requeue(trainer: "pl.Trainer", handler: Callable[[int, FrameType | None], None]) -> None:
    """Have `handler` called on SLURM's signal, as `handle_sigterm` has one called on SIGTERM."""
    connector: Any = trainer._signal_connector
    connector._slurm_sigusr_handler_fn = lambda signum, frame: handler(signum, frame)


def forget_signal_handlers(module: "pl.LightningModule") -> None:
    """Undo `handle_sigterm` and `handle_requeue`, for the next run."""
    if module._trainer is not None:
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(module.trainer._signal_connector).pop(name, None)


def requeue_signal(trainer: "pl.Trainer") -> int:
    """Return the number of the signal at which Lightning has SLURM requeue the job; 0 for none."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return 0
    return int(environment.requeue_signal or 0)


def requeue_path(trainer: "pl.Trainer") -> str:
    """Return a new place for a checkpoint that a job finds when SLURM starts it again."""
    connector = trainer._checkpoint_connector
    return str(connector.hpc_save_path(trainer.default_root_dir))


def requeue(trainer: "pl.Trainer", save: Callable[[], None]) -> None:
    """Finish loggers, save, and on rank 0 have SLURM requeue the job; each rank must call."""
    connector: Any = trainer._signal_connector
    places = trainer._checkpoint_connector
    with (
        instead(places, "hpc_save_path", lambda *_: ""),
        instead(trainer, "save_checkpoint", lambda *_: save()),
    ):
        type(connector)._slurm_sigusr_handler_fn(connector, requeue_signal(trainer), None)


def begin_validation_anew(trainer: "pl.Trainer") -> bool:
    """Let a fit that has ended within a validation be saved as one that begins it.

    Lightning 2.6 would go on with its first batches once more, and with their metrics alone.
    """
    progress: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    if progress.total.started == progress.total.processed:
        return False
    for count in ("ready", "started", "processed", "completed"):
        begun = getattr(progress.total, count) - progress.current.completed
        setattr(progress.total, count, begun)
    progress.current.reset()
    return True


class EpochValue(NamedTuple):
    """What one rank has logged under a name, for an epoch's end."""

    names: tuple[str, str]
    reduction: str
    total: float
    weight: float
    in_steps: int
    each: Sequence[tuple[float, float]] = ()  # values and weights, where the sum is to be exact


def epoch_values(
    trainer: "pl.Trainer", each: Callable[[str, bool], Sequence[tuple[float, float]]]
) -> dict[str, EpochValue]:
    """Return what this rank has logged in the epoch that ends, but for what is one group's."""
    results: Any = trainer._results or {}
    found = {}
    for key, one in results.items():
        meta, sync = one.meta, one.meta.sync
        is_shared = not (one.has_reset or sync.rank_zero_only or sync.group is not None)
        if one.is_tensor and is_shared and (meta.on_epoch or results.training):
            is_mean = meta.on_epoch and meta.is_mean_reduction
            found[key] = EpochValue(
                names=results._forked_name(one, not meta.on_epoch),
                reduction=meta.reduce_fx.__name__ if meta.on_epoch else "mean",
                total=float(one.value),
                weight=float(one.cumulated_batch_size) if is_mean else 1.0,
                in_steps=one._update_count if meta.on_step and sync.should else 0,
                each=each(key, bool(meta.on_epoch)),
            )
    return found


def take_epoch_value(trainer: "pl.Trainer", key: str, names: tuple[str, str], value: float) -> None:
    """Take a value for what loggers and callbacks get; a rank need not have logged it itself."""
    results: Any = trainer._results
    found = torch.tensor(value, dtype=torch.float64)
    found = found.to(results[key].value if key in results else trainer.strategy.root_device)
    if key in results:
        results[key]._computed = found
    trainer._logger_connector._callback_metrics.update(dict.fromkeys(names, found))


@contextmanager
def recording_values(
    trainer: "pl.Trainer", note: Callable[..., None], at_step: Callable[[Sequence[str]], None]
) -> Iterator[None]:
    """Tell `note` of each value that steps log, and before loggers get some `at_step` of those."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector

    def noting(results: Any, update: Callable[..., None], key: str, value: Any, size: int) -> None:
        note(key, value, size, is_first=results[key].has_reset)
        update(key, value, size)

    def before_logged() -> None:
        if trainer.fit_loop._should_accumulate() or not connector.should_update_logs:
            return
        results: Any = trainer._results or {}
        logged = [key for key, one in results.items() if one.is_tensor and one.meta.on_step]
        at_step([key for key in logged if not results[key].has_reset])

    with ExitStack() as stack:
        stack.enter_context(
            _with_calls(connector, "update_train_step_metrics", first=before_logged)
        )
        loops = loop, loop.val_loop, trainer.validate_loop, trainer.test_loop
        for results in [one._results for one in loops]:
            stack.enter_context(instead(results, "update_metrics", partial(noting, results)))
        yield


def take_step_value(trainer: "pl.Trainer", key: str, value: float) -> None:
    """Take a value for what loggers get of a step."""
    results: Any = trainer._results
    one = results[key]
    one._forward_cache = torch.tensor(value, dtype=torch.float64).to(one._forward_cache)


def is_within_epoch(trainer: "pl.Trainer") -> bool:
    """Whether a loop is at one of its batches."""
    return trainer._logger_connector._first_loop_iter is not None


@contextmanager
def sharing_values(
    trainer: "pl.Trainer",
    at_epoch_end: Callable[[], None],
    mean: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Iterator[None]:
    """Share what is logged, and what is monitored."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    with ExitStack() as stack:
        stack.enter_context(_with_calls(connector, "epoch_end_reached", then=at_epoch_end))
        stack.enter_context(_with_calls(connector, "on_epoch_end", first=at_epoch_end))
        shared = instead(
            loop, "_get_monitor_value", lambda monitored, key: mean({key: monitored(key)})[key]
        )
        stack.enter_context(shared)
        for one in trainer.checkpoint_callbacks:
            if isinstance(one, ModelCheckpoint):
                candidates = instead(one, "_monitor_candidates", lambda own, of: mean(own(of)))
                stack.enter_context(candidates)
        yield


def computes_full(metric: Metric) -> bool:
    """Whether `compute` would ask for the full state: nothing cached, not inside `forward`."""
    return metric._computed is None and metric._should_unsync


def forget_computed(metric: Metric) -> None:
    """Drop the cached result, so that the next `compute` computes."""
    metric._computed = None


def is_persistent(metric: Metric) -> bool:
    """Whether the metric's state is part of the module's state dict."""
    return any(metric._persistent.values())


def copied_state(metric: Metric) -> dict[str, Any]:
    """Return the metric's state, in tensors and lists that no update changes."""
    copied: dict[str, Any] = apply_to_collection(metric.metric_state, Tensor, Tensor.clone)
    return copied


def set_state(metric: Metric, states: dict[str, Any], update_count: int) -> None:
    """Give the metric a state as if it had been updated to it."""
    for name, state in states.items():
        is_kept_on_cpu = metric.compute_on_cpu and isinstance(state, list)
        device = "cpu" if is_kept_on_cpu else metric.device
        setattr(metric, name, apply_to_collection(state, Tensor, Tensor.to, device))
    metric._update_count = update_count


def step_value(metric: Metric) -> Any:
    """Return the last result of `forward`, which Lightning logs on a step."""
    return metric._forward_cache


def set_step_value(metric: Metric, value: Any) -> None:
    """Let Lightning log `value` on a step."""
    metric._forward_cache = value
