"""Plain attributes that hooks and steps set: taken back with the steps, and told to newcomers.

    on_train_start       self.weight = 1.0     every rank sets it by itself
    an epoch's hooks     self.weight = 0.5     a setting: stays as it is while steps are made
    steps, validations   self.seen.append(x)   each rank's own: changes with the steps
    a loss               every rank has its own values of the boundary again
    a join               newcomers get the settings, where all others have the same

They are looked for in the user's module, callbacks, data module and dataset. Other objects than
numbers, texts, tensors, arrays and containers of them, and large ones, stay as they are.
"""

import io
import pickle
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.elastic._lightning import is_time, training_dataset
from lightning_shard.environments.launchers.replicas import OF_LIGHTNING, put

Values = dict[tuple[str, str], Any]  # by owner and attribute

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, deque, dict, set, frozenset)
_BY_NAME = (type, FunctionType, BuiltinFunctionType, torch.dtype)
_PLAIN = (complex, *_CONTAINERS, *_BY_NAME, np.ndarray, np.generic, np.dtype)
_MOST, _MOST_OF_DATA = 10_000, 64  # entries; a dataset may hold its samples
_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_shard.")


class HeldValues(NamedTuple):
    """One rank's values at a boundary."""

    changed: Values
    settled: set[tuple[str, str]]


class HookValues:
    """The attributes of one rank's objects.

    It `keeps_flags`, whatever is True or False, on a rank that has raised an error of its own: it
    may have noted so, to do otherwise now.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.keeps_flags = False
        self._trainer = trainer
        self._at_start: Values = {}
        self._before: Values = {}  # what had changed at the last boundary, or in an epoch's hooks

    def begin(self) -> None:
        """Note what every rank has set by itself, when training begins."""
        self._at_start = _values(self._trainer)

    def held(self) -> HeldValues:
        """Return the values at a boundary, or note what an epoch's hooks have set."""
        before, start = self._before, self._at_start
        self._before = now = {
            key: value
            for key, value in _values(self._trainer).items()
            if key not in start or start[key] != value
        }
        return HeldValues(now, {key for key in now if key in before and before[key] == now[key]})

    def load(self, first: HeldValues, own: HeldValues | None, collectives: Collectives) -> None:
        """Set what this rank had at a boundary, or on a newcomer (without `own`) what hooks set."""
        told = {key: first.changed[key] for key in first.settled}
        mine = None
        if own is not None:
            mine = {key for key, value in told.items() if own.changed.get(key) != value}
        of_all_ranks = collectives.all_gather_object(mine)
        unlike = {key for theirs in of_all_ranks for key in theirs or ()}
        common = {key: value for key, value in told.items() if key not in unlike}
        self._before = common if own is None else own.changed
        self._set(self._at_start | self._before)
        if unlike and None in of_all_ranks:
            names = ", ".join(sorted(f"{name} of the {owner}" for owner, name in unlike))
            rank_zero_warn(
                f"Ranks join, and what was set since training began differs between the others: "
                f"{names}. Those that join go on with what they have set themselves. Set it anew "
                f"before each step, where steps depend on it."
            )

    def load_data_again(self) -> None:
        """Set what hooks have set in a dataset that was made anew meanwhile."""
        self._set({key: one for key, one in self._before.items() if key[0].startswith("data")})

    def _set(self, values: Values) -> None:
        owners, present = dict(_owners(self._trainer)), _values(self._trainer)
        for (owner, name), value in values.items():
            now = present.get((owner, name))
            is_flag = self.keeps_flags and isinstance(now, bool) and name != "training"
            if owner in owners and value is not _Odd and value != now and not is_flag:
                put(vars(owners[owner]), name, _thawed(value))


class _Odd:
    """Stands for what is not plain, or too large."""


class _PlainBytes(bytes):
    """Pickled plain data."""


class _Packer(pickle.Pickler):
    """Pickles plain data of at most so many entries, alike wherever it is alike."""

    def __init__(self, file: io.BytesIO, most: int) -> None:
        super().__init__(file)
        self.fast = True  # whichever of its parts are one object
        self._most = most

    def reducer_override(self, one: Any) -> Any:
        """Pickle a tensor by its elements, and no objects that are not plain."""
        if type(one) is Tensor and one.numel() <= self._most:
            return _tensor, (one.tolist(), one.dtype, tuple(one.shape), one.device.type)
        is_large = isinstance(one, np.ndarray) and one.size > self._most
        if isinstance(one, _PLAIN) and not is_large:
            return NotImplemented
        raise pickle.PicklingError


def _tensor(elements: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor(elements, dtype=dtype, device=device).reshape(shape)


def _frozen(value: Any, most: int) -> Any:
    """Return plain data as it is now, if it has at most so many entries."""
    if isinstance(value, _SCALARS):
        return value
    file = io.BytesIO()
    if isinstance(value, _CONTAINERS) and len(value) > most:
        return _Odd
    try:
        _Packer(file, most).dump(value)
    except Exception:  # an object's own way of being pickled raises what it likes
        return _Odd
    return _PlainBytes(file.getvalue())


def _thawed(value: Any) -> Any:
    return pickle.loads(value) if isinstance(value, _PlainBytes) else value


def _owners(trainer: "pl.Trainer") -> Iterator[tuple[str, Any]]:
    owner: Any = trainer
    for name, part in owner.lightning_module.named_modules():
        yield f"module {name}".strip(), part
    for number, callback in enumerate(owner.callbacks):
        is_shared = hasattr(callback, "__deepcopy__")  # by ranks of one process, if it says so
        if not is_shared and not type(callback).__module__.startswith(_PACKAGES):
            yield f"callback {type(callback).__name__} {number}", callback
    if owner.datamodule is not None:
        yield "data module", owner.datamodule
    dataset, name = training_dataset(trainer), "dataset"
    while hasattr(dataset, "__dict__"):
        yield name, dataset
        dataset, name = getattr(dataset, "dataset", None), f"{name}.dataset"


def _values(trainer: "pl.Trainer") -> Values:
    return {
        (owner, name): _frozen(value, _MOST_OF_DATA if owner.startswith("data") else _MOST)
        for owner, one in _owners(trainer)
        for name, value in vars(one).items()
        if (name not in OF_LIGHTNING or name == "training") and not is_time(one, name)
    }
