"""Values that all ranks of a group have alike: one rank's, or one value of all that they have.

`SharedValues` sends one rank's, in one small message where their form is known.

    {"loss": tensor(0.5), "n": 3, "text": "a"}
      numbers   0.5  3                                one float64 tensor, every time
      form      {"loss": slot, "n": slot, "text": "a"}   an object, the first time only
      the rest  larger tensors, other objects         messages of their own

The message is as long as the longest form that the group has met, so that ranks which wait for it
need not know what comes.

`common_values` makes one value of what all ranks have logged, so that what decides by it (a
scheduler, a checkpoint) decides alike. An epoch's values are matched by name, with sync_dist or
without; what is reduced in steps by `sync_dist=True` goes by the order of calls, and so ranks
compare at an epoch's end which names they have logged so.

Means of what steps log that are the same on any number of ranks: exact sums, rounded once.

    rank 0   micro-batches 0 1   logs  a b       on a step   fsum(a b c d) / 4
    rank 1   micro-batches 2 3   logs  c d       an epoch    fsum of all of them / their samples

Lightning keeps one sum for each rank, which depends on what that rank has had.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.streams import sent_up
from lightning_shard.core.placeholders import Placeholder
from lightning_shard.data_parallel.agreement import met
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import held_values, with_values
from lightning_shard.strategies.trainer import _lightning
from lightning_shard.strategies.trainer._lightning import recording_values, take_step_value

_MAX_FORMS = 64  # names that change with every batch must not fill the memory
_MAX_NUMEL = 64  # of a tensor among the numbers
_MAX_INTEGER = 2**53  # exact in float64
_UNKNOWN = -1.0


class SharedValues:
    """Sends values from one rank, `source`, to the group, whose ranks call `share` in one order."""

    def __init__(self, group: Collectives, source: int) -> None:
        self._group = group
        self._source = source
        self._forms: list[_Form] = []
        self._indices: dict[bytes, int] = {}
        self._capacity = 0

    def share(self, value: Any, device: torch.device) -> Any:
        """Return the source's value on every rank."""
        if self._group.size == 1:
            return value
        if self._group.rank == self._source:
            self._send(_packed(value), device)
            return value
        return self._receive(device)

    def _send(self, packed: "_TakenApart", device: torch.device) -> None:
        form = _Form(value=packed.form, num_scalars=len(packed.scalars))
        encoded, objects = self._pickled(form), self._pickled(packed.objects)
        index = self._indices.get(encoded)
        numbers = _joined(packed, device)
        message = torch.zeros(1 + self._capacity, dtype=torch.float64, device=device)
        # `message[0] = number` would copy the number from pageable memory, and wait
        message[:1].fill_(_UNKNOWN if index is None else index)
        if index is not None:
            message[1 : 1 + len(numbers)] = numbers
        self._group.broadcast(message, self._source).wait()
        if index is None:
            self._group.broadcast_object((encoded, numbers.tolist()), self._source)
            self._learn(encoded, form, len(numbers))
        if packed.objects:
            self._group.broadcast_object(objects, self._source)
        for tensor in packed.tensors:
            self._group.broadcast(_bytes_of(tensor.to(device)), self._source).wait()

    def _pickled(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"Rank {self._group.rank} of the pipeline: what a step returns, logs or keeps "
                f"in a list cannot be sent to other ranks ({error}), expected tensors, "
                f"numbers, texts, and lists and dictionaries of them. Keep it in a tuple, "
                f"which is left to the last stage, or in on_train_batch_end."
            ) from error

    def _receive(self, device: torch.device) -> Any:
        message = torch.empty(1 + self._capacity, dtype=torch.float64, device=device)
        self._group.broadcast(message, self._source).wait()
        first, *numbers = message.tolist()
        if first == _UNKNOWN:
            nothing: tuple[bytes, list[float]] = (b"", [])
            encoded, numbers = self._group.broadcast_object(nothing, self._source)
            form = pickle.loads(encoded)
            self._learn(encoded, form, len(numbers))
            message = torch.tensor([first, *numbers], dtype=torch.float64, device=device)
        else:
            form = self._forms[int(first)]
        unpacking = _Unpacking(
            group=self._group,
            source=self._source,
            scalars=iter(numbers[: form.num_scalars]),
            elements=message[1 + form.num_scalars :],
        )
        return unpacking.unpacked(form.value)

    def _learn(self, encoded: bytes, form: "_Form", num_numbers: int) -> None:
        """Remember a form; the same on each rank, so that they give it the same index."""
        if len(self._forms) == _MAX_FORMS:
            self._forms.clear()
            self._indices.clear()
        self._indices[encoded] = len(self._forms)
        self._forms.append(form)
        self._capacity = max(self._capacity, num_numbers)


@dataclass(frozen=True)
class _Form:
    """A value whose numbers, tensors and objects are taken out."""

    value: Any
    num_scalars: int


@dataclass(frozen=True)
class _Number:
    """Stands in a form for an int or a float."""

    kind: type[int] | type[float]


@dataclass(frozen=True)
class _SmallTensor:
    """Stands in a form for a floating-point tensor whose elements are among the numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Object:
    """Stands in a form for the next of the objects, which may be a `_LargeTensor`."""


@dataclass(frozen=True)
class _LargeTensor:
    """Stands among the objects for a tensor that is sent in a message of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class _TakenApart:
    """A value taken apart: its form, and the parts that were taken out of it, in order."""

    form: Any = None
    scalars: list[float] = field(default_factory=list)
    small_tensors: list[Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def taken(self, value: Any) -> Any:
        """Return the stand-in for `value` in the form, and keep the value."""
        if isinstance(value, Tensor):
            return self._taken_tensor(value.detach())
        if type(value) is float or (type(value) is int and abs(value) < _MAX_INTEGER):
            self.scalars.append(value)
            return _Number(type(value))
        if value is None or isinstance(
            value, str | bool | torch.dtype | FunctionType | BuiltinFunctionType
        ):
            return value
        held = None if isinstance(value, torch.Size) else held_values(value)
        if held is None:
            self.objects.append(value)
            return _Object()
        return with_values(value, {key: self.taken(one) for key, one in held.items()})

    def _taken_tensor(self, tensor: Tensor) -> _SmallTensor | _Object:
        shape = tuple(tensor.shape)
        if isinstance(tensor, Placeholder):
            raise ConfigError(
                f"The step returns a tensor of shape {shape} that is computed from "
                f"{tensor.origin!r}, which another stage of the pipeline holds, expected what the "
                f"last stage has. Return what is computed from the blocks or the batch alone."
            )
        if tensor.layout != torch.strided:
            self.objects.append(tensor.cpu())
        elif tensor.is_floating_point() and tensor.numel() <= _MAX_NUMEL:
            self.small_tensors.append(tensor.reshape(-1))
            return _SmallTensor(tensor.dtype, shape)
        else:
            self.objects.append(_LargeTensor(tensor.dtype, shape))
            self.tensors.append(tensor)
        return _Object()


def _packed(value: Any) -> _TakenApart:
    packed = _TakenApart()
    packed.form = packed.taken(value)
    return packed


def _joined(packed: _TakenApart, device: torch.device) -> Tensor:
    scalars = sent_up(torch.tensor(packed.scalars, dtype=torch.float64), device)
    return torch.cat([scalars, *(one.to(device, torch.float64) for one in packed.small_tensors)])


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes, or a copy; not every backend moves every type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class _Unpacking:
    """Puts the parts that were taken out back into a form, in the same order."""

    group: Collectives
    source: int
    scalars: Iterator[float]
    elements: Tensor
    objects: list[Any] | None = None

    def unpacked(self, form: Any) -> Any:
        if isinstance(form, _Number):
            return form.kind(next(self.scalars))
        if isinstance(form, _SmallTensor):
            return self._small_tensor(form)
        if isinstance(form, _Object):
            return self._object()
        held = held_values(form)
        if held is None:
            return form
        return with_values(form, {key: self.unpacked(one) for key, one in held.items()})

    def _small_tensor(self, form: _SmallTensor) -> Tensor:
        numel = math.prod(form.shape)
        flat, self.elements = self.elements[:numel], self.elements[numel:]
        return flat.to(form.dtype, copy=True).reshape(form.shape)

    def _object(self) -> Any:
        if self.objects is None:
            self.objects = pickle.loads(self.group.broadcast_object(b"", self.source))
        value = self.objects.pop(0)
        if not isinstance(value, _LargeTensor):
            return value
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self.elements.device)
        self.group.broadcast(_bytes_of(tensor), self.source).wait()
        return tensor


@contextmanager
def common_values(trainer: "pl.Trainer", strategy: Any) -> Iterator[None]:
    """Give ranks one value of each name that they log inside, and compare their settings."""

    def at_epoch_end() -> None:
        exact = strategy.run.same_bits.values_of_epoch
        of_all = met(
            _lightning.epoch_values(trainer, exact), strategy.data_collectives, "an epoch's values"
        )
        _check_steps(of_all, strategy.global_rank)
        for key, found in _by_name(of_all):
            _lightning.take_epoch_value(trainer, key, found[0].names, _combined(found))
        strategy.run.loops.check_settings(trainer)

    def mean(values: Mapping[str, Any]) -> Mapping[str, Any]:
        if trainer.state.status != TrainerStatus.RUNNING:  # others may be elsewhere
            return values
        if _lightning.is_within_epoch(trainer) and not strategy.meets_at_steps:
            return values
        numbers = {key: float(one) for key, one in values.items() if _is_number(one)}
        of_all = met(numbers, strategy.data_collectives, "what is monitored")
        means = {key: sum(each) / len(each) for key, each in _by_name(of_all)}
        return {**values, **{key: _like(values.get(key), one) for key, one in means.items()}}

    with _lightning.sharing_values(trainer, at_epoch_end, mean):
        yield


def _like(own: Any, mean: float) -> Tensor:
    """Return a mean in the format of this rank's own value, as callbacks compare and save it."""
    return torch.tensor(mean, dtype=own.dtype if isinstance(own, Tensor) else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _by_name(of_all: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name with the values of the ranks that have one, in the same order on all."""
    for key in dict.fromkeys(key for one in of_all for key in one):
        yield key, [one[key] for one in of_all if key in one]


def _combined(found: Sequence[_lightning.EpochValue]) -> float:
    if found[0].each and found[0].reduction in ("mean", "sum"):
        each = [value for one in found for value in one.each]
        return mean_of(each) if found[0].reduction == "mean" else math.fsum(one for one, _ in each)
    totals, count = [one.total for one in found], sum(one.weight for one in found)
    reduce = {"max": max, "min": min}.get(found[0].reduction, sum)
    total = reduce(totals)
    return total if found[0].reduction != "mean" else total / count if count else float("nan")


def _check_steps(of_all: Sequence[Mapping[str, _lightning.EpochValue]], rank: int) -> None:
    told = [
        {one.names[0]: one.in_steps for one in each.values() if one.in_steps} for each in of_all
    ]
    if other := next((at for at, one in enumerate(told) if one != told[0]), 0):
        raise ConfigError(
            f"Rank {rank}: what is logged in steps with sync_dist=True is averaged in the order of "
            f"the calls, expected the same names as often on all ranks, or different names mix up: "
            f"by name and times, of the ranks with other samples the first has logged {told[0]} in "
            f"this epoch and number {other} {told[other]}. Log each name on every rank, or with "
            f"on_step=False, on_epoch=True, which goes by name."
        )


Logged = tuple[float, float]  # a value and its number of samples


class ExactMeans:
    """Keeps an epoch's logged values of micro-batches that count, with the parts of a mean."""

    counts = True
    parts: Sequence[Logged] = ()

    def __init__(self) -> None:
        # by key, with the number of the step that each was logged in
        self._values: dict[str, list[tuple[int, Sequence[tuple[Tensor | float, float]]]]] = {}

    @contextmanager
    def inside(
        self, trainer: "pl.Trainer", ranks: Callable[[], Collectives], num_own: Callable[[], int]
    ) -> Iterator[None]:
        """Keep what is logged inside, and let what is logged on steps be means of all ranks."""

        def at_step(keys: Sequence[str]) -> None:
            own = {key: self.of(key, last=num_own()) for key in keys}
            of_all = met(own, ranks(), "a step's values")
            _check_same_keys(of_all)
            for key in keys:
                take_step_value(
                    trainer, key, mean_of([one for each in of_all for one in each[key]])
                )

        def note(key: str, value: Any, batch_size: int, *, is_first: bool) -> None:
            step = trainer.fit_loop.epoch_loop.batch_idx // num_own()
            self._note(key, value, batch_size, step, is_first=is_first)

        with recording_values(trainer, note, at_step):
            yield

    def _note(self, key: str, value: Any, batch_size: int, step: int, *, is_first: bool) -> None:
        if is_first:
            self._values[key] = []
        size = batch_size if self.counts else 0
        if isinstance(value, Tensor):
            one = [(value.detach().clone(), size)]
            self._values.setdefault(key, []).append((step, self.parts or one))

    def of(self, key: str, *, last: int = 0) -> list[Logged]:
        """Return what was logged under a key, or the last of it, with the numbers of samples."""
        noted = self._values.get(key, [])[-last:]
        if last:  # a hook may have logged less often than a micro-batch
            noted = [one for one in noted if one[0] == noted[-1][0]]
        return [(float(one), float(size)) for _, parts in noted for one, size in parts]


def _check_same_keys(of_all: Sequence[Mapping[str, Any]]) -> None:
    """Refuse values of a step that some ranks have logged in none of their micro-batches."""
    logged = set().union(*of_all)
    for rank, own in enumerate(of_all):
        if missing := sorted(logged - own.keys()):
            raise ConfigError(
                f"Rank {rank}: same_bits=True, but nothing was logged as {missing[0]!r} in a step "
                f"in which other ranks have logged it, expected it from each micro-batch. Log it "
                f"in all of them, without rank_zero_only."
            )


def mean_of(values: Sequence[Logged]) -> float:
    """Return the mean by the numbers of samples; every rank has the same, in whatever order."""
    samples = math.fsum(size for _, size in values)
    return math.fsum(value * size for value, size in values) / samples if samples else math.nan
