"""Copies of trainer, model and arguments for the ranks that do not run on the originals.

One deep copy with one memo, so that what was one object stays one. Some things are not copied:
map-style datasets, loggers (they hold files, and act on rank 0 only) and the standard streams are
shared; a profiler is rank 0's alone; a module's tensors that carry a graph are copied detached.
Functions that hold something of the model belong to the copy: see `_copy`.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.errors import ConfigError
from lightning_shard.launchers._copy import copy_with_functions
from lightning_shard.launchers._lightning import (
    TunerExit,
    call_and_handle_interrupt,
    forget_identities,
    forget_launcher,
    take_down,
)
from lightning_shard.launchers.failures import Circumstances, noted, tell

_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Replica:
    """The copies on which one rank other than 0 runs.

    Attributes:
        function: The launched function.
        trainer: The copy of the trainer; None without one.
        args: Copies of the function's positional arguments.
        kwargs: Copies of the function's keyword arguments.
    """

    function: Callable[..., Any]
    trainer: "pl.Trainer | None"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def copy_of(
        cls,
        function: Callable[..., Any],
        trainer: "pl.Trainer | None",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "Replica":
        """Copy function, trainer and arguments together.

        Raises:
            ConfigError: An object in them cannot be copied; the message names the attribute.
        """
        owners = find_owners(trainer, args, kwargs)
        full = (function, trainer, args, kwargs)
        try:
            memo = memo_of(trainer, owners, (args, kwargs))
            copied = copy_with_functions(full, memo, modules_of(owners), _others(trainer, owners))
        except Exception as error:
            name = _find_culprit(owners, memo_of(trainer, owners, (args, kwargs))) or "trainer"
            raise ConfigError(
                f"in_process: {name} cannot be copied for the ranks other than 0 "
                f"({type(error).__name__}: {error}). Make it in setup(), which each rank calls "
                "for itself, or give its class a __deepcopy__."
            ) from error
        replica = cls(*copied)
        if replica.trainer is not None:
            forget_launcher(replica.trainer)
        for owner in find_owners(replica.trainer, replica.args, replica.kwargs).values():
            if isinstance(owner, pl.LightningModule):
                forget_identities(owner)
        return replica

    def run(self, meet: Callable[[BaseException], Circumstances]) -> Any:
        """Run the function, with Lightning's handling of exceptions if there is a trainer.

        No callback and no strategy hears of a rank that a fault drops, as of a killed process.

        Args:
            meet: Called with the function's error; lets the other ranks raise, too.
        """
        if self.trainer is None:
            return self.function(*self.args, **self.kwargs)
        ended: list[BaseException] = []
        result = call_and_handle_interrupt(self.trainer, self._call, meet, ended)
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
        except TunerExit:
            raise
        except RankDropped as end:
            ended.append(end)
        except BaseException as error:
            ended.append(error)
            tell(trainer, meet(error))
            with noted(error, "the teardown"):
                take_down(trainer, error)
        return None


def find_owners(
    trainer: "pl.Trainer | None", args: tuple[Any, ...], kwargs: dict[str, Any]
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
    """Return a deep copy's memo that already has the objects that are not copied.

    Args:
        trainer: The Trainer whose loggers the copies share; None shares none.
        owners: The user's objects by name; see `find_owners`.
        arguments: The arguments of the launched function.
    """
    memo: dict[int, Any] = {id(stream): stream for stream in _standard_streams()}
    for dataset in _find_datasets([arguments, *(vars(owner) for owner in owners.values())]):
        memo[id(dataset)] = dataset
    if trainer is not None:
        memo.update({id(logger): logger for logger in trainer.loggers})
        profiler = vars(trainer).get("profiler")
        if profiler is not None and not isinstance(profiler, PassThroughProfiler):
            memo[id(profiler)] = PassThroughProfiler()
    for owner in owners.values():
        for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
            for tensor in _find_graph_tensors(_own_attributes(part)):
                memo[id(tensor)] = tensor.detach().clone()
    return memo


def _standard_streams() -> list[Any]:
    return [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]


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


def _find_graph_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers that are not leaves of their graph."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    else:
        for entry in _entries(value):
            yield from _find_graph_tensors(entry)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


def _own_attributes(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if name not in _MODULE_TABLES}


def _find_culprit(owners: Mapping[str, Any], memo: dict[int, Any]) -> str | None:
    """Return the dotted name of the first attribute that cannot be copied by itself."""
    for owner_name, owner in owners.items():
        for path, part in owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]:
            for name, value in _own_attributes(part).items():
                if isinstance(value, (nn.Module, pl.Trainer)) or value is None:
                    continue
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    dotted = ".".join(step for step in (path, name) if step)
                    return f"{owner_name}.{dotted}, a {type(value).__name__},"
    return None
