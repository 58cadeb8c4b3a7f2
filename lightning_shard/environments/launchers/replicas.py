"""Copies of trainer, model and arguments for the ranks that do not run on the originals.

One deep copy with one memo, so that what was one object stays one. Map-style datasets, loggers and
the standard streams are shared, and a profiler is rank 0's alone. What else stops no copy, and how
the rest is named: see `_copy`. Loggers are called once per event, whatever the number of ranks:
Lightning calls those of every rank, and one may not be decorated with `rank_zero_only`.

Gives the caller's model and trainer a survivor's results when rank 0 on them is lost.

    thread 0  model, trainer ──✗ dropped                     ┌──> weights, optimizers, progress,
    thread 1  their copies   ─────────── trains on ── ends ──┘    metrics: the caller's now

The caller's model, strategy and trainer stay the objects that they are. The parameters are the
survivor's, as its optimizers refer to them. What hooks have set on a copy of the model, a callback
or the data module is set on the caller's; containers are filled anew, so that whoever holds one
sees it. What torch and Lightning keep in a module stays the original's.
"""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.core.extensions import instead
from lightning_shard.environments.launchers import _copy, _lightning
from lightning_shard.environments.launchers._copy import copy_with_functions
from lightning_shard.environments.launchers.failures import Circumstances, noted, tell
from lightning_shard.errors import ConfigError, RankFailedError


@dataclass(frozen=True)
class Replica:
    """The copies on which one rank other than 0 runs."""

    function: Callable[..., Any]
    trainer: "pl.Trainer | None"
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @classmethod
    def copy_of(
        cls,
        function: Callable[..., Any],
        trainer: "pl.Trainer | None",
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> "Replica":
        """Copy function, trainer and arguments together; see `copy_for_rank`."""
        owners = find_owners(trainer, args, kwargs)
        named = {**_arguments(function, args, kwargs), **owners, "trainer": trainer}
        copied = copy_for_rank(
            (function, trainer, args, kwargs),
            memo_of(trainer, owners, (args, kwargs)),
            modules_of(owners),
            _others(trainer, owners),
            {id(value): name for name, value in named.items()},
            "setup(), or the loader in train_dataloader(), which each rank calls for itself",
        )
        replica = cls(*copied)
        if replica.trainer is not None:
            _lightning.forget_launcher(replica.trainer)
        for owner in find_owners(replica.trainer, replica.args, replica.kwargs).values():
            if isinstance(owner, pl.LightningModule):
                _lightning.forget_identities(owner)
        return replica

    def run(self, meet: Callable[[BaseException], Circumstances]) -> Any:
        """Run the function, with Lightning's handling of exceptions if there is a trainer.

        Nobody hears of a rank that a fault drops, as of a killed process.
        """
        if self.trainer is None:
            return self.function(*self.args, **self.kwargs)
        ended: list[BaseException] = []
        result = _lightning.call_and_handle_interrupt(self.trainer, self._call, meet, ended)
        if ended:
            raise ended[0]
        return result

    def _call(
        self, meet: Callable[[BaseException], Circumstances], ended: list[BaseException]
    ) -> Any:
        """Run the function; Lightning handles only the exceptions that every rank leaves by."""
        trainer = self.trainer
        assert trainer is not None
        try:
            return self.function(*self.args, **self.kwargs)
        except _lightning.TunerExit:
            raise
        except RankDropped as end:
            ended.append(end)
        except BaseException as error:
            ended.append(error)
            tell(trainer, meet(error))
            with noted(error, "the teardown"):
                _lightning.take_down(trainer, error)
        return None


def _arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by the names that the function has for them."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict(kwargs)


def copy_for_rank(
    call: Any,
    memo: Mapping[int, Any],
    modules: list[nn.Module],
    others: list[Any],
    names: Mapping[int, str],
    place: str,
) -> Any:
    """Return a copy of a call for a rank other than 0; iterators become ones that can be copied.

    Args:
        call: Function and arguments; its lists, dictionaries and objects may get other iterators.
        memo: What is not copied, by `id`.
        modules: Modules in the call.
        others: Further objects in it that functions may hold.
        names: Names of objects by `id`, for messages.
        place: Where to make what cannot be copied.
    """
    exchanged = list[Any]()
    while True:
        try:
            return _copy.copy_with_functions(call, dict(memo), modules, others)
        except Exception as error:
            way = _copy.way_of(error)
            name = _copy.name_of(way, names, "what is launched")
            iterator = _copy.exchange_iterator(way)
            if iterator is None or any(one is iterator for one in exchanged):
                raise ConfigError(
                    f"in_process: {name} cannot be copied for the ranks other than 0 "
                    f"({type(error).__name__}: {error}). Make it in {place}, or give its class a "
                    f"__deepcopy__."
                ) from error
        exchanged.append(iterator)
        rank_zero_warn(
            f"in_process: {name} gives every rank all of its items, as it cannot be copied. "
            f"Make it in {place}, if ranks are to have items of their own."
        )


def find_owners(
    trainer: "pl.Trainer | None", args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return by name the user's objects whose attributes need care."""
    owners: dict[str, Any] = {}
    if trainer is not None:
        if trainer.lightning_module is not None:
            owners["model"] = trainer.lightning_module
        for callback in getattr(trainer, "callbacks", []):
            name = f"callback {type(callback).__name__}"
            same = sum(one == name or one.startswith(f"{name} ") for one in owners)
            owners[f"{name} {same + 1}" if same else name] = callback
    for value in (*args, *kwargs.values()):
        if isinstance(value, (nn.Module, pl.LightningDataModule)):
            kind = "model" if isinstance(value, nn.Module) else "datamodule"
            owners.setdefault(kind, value)
    return owners


def modules_of(owners: Mapping[str, Any]) -> list[nn.Module]:
    """Return those that are modules."""
    return [owner for owner in owners.values() if isinstance(owner, nn.Module)]


def _others(trainer: "pl.Trainer | None", owners: Mapping[str, Any]) -> list[Any]:
    """Return the objects besides modules that are copied, and that functions may hold."""
    others = [owner for owner in owners.values() if not isinstance(owner, nn.Module)]
    return others if trainer is None else [*others, trainer, trainer.strategy]


def memo_of(
    trainer: "pl.Trainer | None", owners: Mapping[str, Any], arguments: Any
) -> dict[int, Any]:
    """Return a deep copy's memo that already has the objects that are not copied."""
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    memo: dict[int, Any] = {id(stream): stream for stream in streams}
    for dataset in _find_datasets([arguments, *(vars(owner) for owner in owners.values())]):
        memo[id(dataset)] = dataset
    if trainer is not None:
        memo.update({id(logger): logger for logger in trainer.loggers})
        profiler = vars(trainer).get("profiler")
        if profiler is not None and not isinstance(profiler, PassThroughProfiler):
            memo[id(profiler)] = PassThroughProfiler()
    return memo


def _find_datasets(value: Any) -> Iterator[Dataset[Any]]:
    """Yield the map-style datasets in nested containers, loaders and data modules."""
    if isinstance(value, Dataset):
        if not isinstance(value, IterableDataset):
            yield value
    elif isinstance(value, DataLoader):
        yield from _find_datasets(value.dataset)
    elif isinstance(value, CombinedLoader):
        yield from _find_datasets(value.flattened)
    elif isinstance(value, pl.LightningDataModule):
        yield from _find_datasets(vars(value))
    else:
        for entry in _entries(value):
            yield from _find_datasets(entry)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


_TOLD = ("after_save_checkpoint", "finalize", "log_graph", "log_hyperparams", "log_metrics", "save")


@contextmanager
def told_once(trainer: "pl.Trainer | None") -> Iterator[None]:
    """Let a trainer's loggers do nothing inside on ranks other than 0; call around all ranks."""
    with ExitStack() as stack:
        for logger in [] if trainer is None else trainer.loggers:
            for name in [one for one in _TOLD if hasattr(logger, one)]:
                stack.enter_context(instead(logger, name, rank_zero_only(_called)))
        yield


def _called(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


def adopt(
    survivor: Replica,
    trainer: "pl.Trainer | None",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_ended_well: bool,
) -> None:
    """Give the originals, on which a lost rank ran, a survivor's results."""
    if trainer is not None and not has_ended_well:
        _lightning.take_down(
            trainer, RankFailedError("Rank 0 was lost; the others went on without it.")
        )
    originals = find_owners(trainer, args, kwargs)
    for name, owner in find_owners(survivor.trainer, survivor.args, survivor.kwargs).items():
        original = originals.get(name)
        if isinstance(owner, nn.Module) and isinstance(original, nn.Module):
            _give_tensors(owner, original)
    give_attributes(survivor, trainer, originals)
    if trainer is not None and survivor.trainer is not None:
        _give_results(survivor.trainer, trainer)


def _give_tensors(source: nn.Module, target: nn.Module) -> None:
    """Give a module the parameters and buffers of another that is built alike."""
    for name, parameter in source.named_parameters(recurse=False, remove_duplicate=False):
        setattr(target, name, parameter)
    for name, buffer in source.named_buffers(recurse=False, remove_duplicate=False):
        setattr(target, name, buffer)
    for name, child in source.named_children():
        mine = getattr(target, name, None)
        if isinstance(mine, type(child)):
            _give_tensors(child, mine)
        else:  # made in a hook that the target has not come to
            setattr(target, name, child)


def _give_results(source: "pl.Trainer", target: "pl.Trainer") -> None:
    """Give a trainer the strategy, metrics, progress and callbacks' state of another."""
    _lightning.exchange_strategy(source, target)
    _lightning.copy_metrics(source, target)
    _lightning.copy_progress(source.fit_loop, target.fit_loop)
    for callback, mine in zip(source.callbacks, target.callbacks, strict=False):  # type: ignore[attr-defined]
        if state := callback.state_dict():
            mine.load_state_dict(state)
    target.should_stop = source.should_stop
    target.state.status, target.state.stage = source.state.status, source.state.stage


OF_LIGHTNING = frozenset({*vars(pl.LightningModule()), *vars(pl.LightningDataModule())})


def give_attributes(
    survivor: Replica, trainer: "pl.Trainer | None", originals: Mapping[str, Any]
) -> None:
    """Give the originals the attributes of what a survivor ran on; parameters are shared."""
    owners = find_owners(survivor.trainer, survivor.args, survivor.kwargs)
    pairs = [pair for name, owner in owners.items() for pair in _pairs(owner, originals.get(name))]
    memo = memo_of(survivor.trainer, owners, (survivor.args, survivor.kwargs))
    memo.update({id(source): target for source, target in pairs})
    if trainer is not None and survivor.trainer is not None:
        memo.update(_lightning.copied_objects(survivor.trainer, trainer))
    modules = modules_of(owners)
    for module in modules:
        memo.update({id(one): one for one in (*module.parameters(), *module.buffers())})
    others = [source for source, _ in pairs] + [survivor.trainer]
    for source, target in pairs:
        for name, value in _attributes(source):
            about = f"{type(source).__name__}.{name}"
            put(vars(target), name, _copied(value, about, memo, modules, others))
        if isinstance(source, (pl.LightningModule, pl.LightningDataModule)):
            about = f"{type(source).__name__}.hparams"
            target.hparams.update(_copied(dict(source.hparams), about, memo, modules, others))


def _pairs(source: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """Yield an owner and its parts, each with the original that it is a copy of."""
    if type(source) is not type(target) or source is target:
        return
    if not isinstance(source, nn.Module):
        yield source, target
        return
    mine = dict(target.named_modules())
    for path, part in source.named_modules():
        if path in mine and type(part) is type(mine[path]) and part is not mine[path]:
            yield part, mine[path]


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    skipped = OF_LIGHTNING if isinstance(owner, (nn.Module, pl.LightningDataModule)) else ()
    return [(name, value) for name, value in vars(owner).items() if name not in skipped]


def _copied(
    value: Any, about: str, memo: dict[int, Any], modules: list[nn.Module], others: Any
) -> Any:
    try:
        return copy_with_functions(value, memo, modules, others)
    except TypeError:  # what Python cannot copy, a lock say, is in nobody's hands any more
        return value
    except Exception as error:
        rank_zero_warn(
            f"{about} is, after this elastic fit, that of a rank that went on to the end, and what "
            f"it refers to of that rank's model, too: its copy raised {type(error).__name__} "
            f"({error}). Set what can be copied there in on_train_end, a detached tensor say."
        )
        return value


def put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; what is in a container changes in place, since others may hold it."""
    present: Any = attributes.get(name)
    is_container = isinstance(present, (list, deque, dict, set))
    if not is_container or type(present) is not type(value) or present is value:
        attributes[name] = value
        return
    present.clear()
    fill = present.extend if isinstance(present, (list, deque)) else present.update
    fill(value)
