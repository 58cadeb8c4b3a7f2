"""What of a checkpoint does not fit, found before anything is loaded, and what to do about it.

Formats of one kind are exchanged as torch does; a conversion that would lose meaning, of numbers
with a fraction to integers or of complex numbers to real ones, is a misfit.

Of optimizers' states torch compares the lengths of groups alone; other misfits fail in the first
step, or are cut in the wrong places. The optimizer itself shows which state it makes for a
parameter: a trial optimizer with the saved options takes a step on a small tensor of as many
dimensions. Entries in a form that says nothing of other sizes are not checked.

    trial's parameter (3, 5)    its state (3, 5)    a parameter (64, 32) has a state (64, 32)
                                         (3, 1)                                     (64, 1)
                                         ()                                         one element
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.errors import CheckpointError

_PLAIN = (int, float, str, tuple, torch.dtype, type(None))
_ADDED = "differentiable"  # torch adds it to the defaults of each optimizer that loads a state


def trial_optimizer(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class on one group, with state of its own, that may step."""
    trial = _made(optimizer, group)
    begin: Any = getattr(trial, "train", None)  # a schedule-free one does not step before it
    if callable(begin):
        begin()
    return trial


def _made(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    options = {key: value for key, value in optimizer.defaults.items() if key != _ADDED}
    with suppress(TypeError):  # its defaults are not its constructor's arguments
        trial = type(optimizer)([group], **options)  # some make their state in the constructor
        vars(trial).update(_settings(optimizer))
        return trial
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = []
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):  # a wrapper would step the one that trains
            setattr(trial, name, _made(value, group))
            trial.param_groups = vars(trial)[name].param_groups
        elif name not in vars(trial):  # torch copies none of a class's own
            setattr(trial, name, copy.copy(value))
    if not trial.param_groups:
        trial.add_param_group(group)
    return trial


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return plain attributes that a constructor takes, and objects that hold such alone."""
    taken, found = inspect.signature(type(optimizer)).parameters, dict[str, Any]()
    for name, value in vars(optimizer).items():
        is_taken = name.lstrip("_") in taken
        values = [*getattr(value, "__dict__", {}).values()] or [value] * is_taken
        if values and all(isinstance(one, _PLAIN) for one in values):
            found[name] = copy.copy(value)
    return found


WEIGHTS_ADVICE = (
    "Load it into the model that it was saved from, with the same settings; names that differ on "
    "purpose are left out with LightningModule.strict_loading = False."
)
_MOST_TOLD = 8
_SIZES = (3, 5, 7, 11, 13, 17)  # of the trial optimizer's dimensions: all different, and none 1
_State = Mapping[str, Any]


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of numbers that a format holds; torch converts formats of one kind."""
    if dtype.is_complex:
        return "complex"
    return "floating-point" if dtype.is_floating_point else "integer"


def dtype_misfits(what: str, got: torch.dtype, expected: torch.dtype) -> list[str]:
    """Return the misfit of numbers that would become another kind; none for one kind."""
    if kind_of(got) == kind_of(expected):
        return []
    return [f"{what} is of {got}, expected {kind_of(expected)} numbers as {expected}"]


def shape_misfits(what: str, got: Sequence[int], expected: Sequence[int]) -> list[str]:
    """Return the misfit of a tensor with another shape than expected; none for the same."""
    if tuple(got) == tuple(expected):
        return []
    return [f"{what} has shape {tuple(got)}, expected {tuple(expected)}"]


def misfit_error(
    owner: str, misfits: Sequence[str], advice: str, loaded: str = "nothing of it was"
) -> CheckpointError:
    """Make the error of a checkpoint that does not fit."""
    told = "; ".join(misfits[:_MOST_TOLD])
    more = f"; and {len(misfits) - _MOST_TOLD} more" if len(misfits) > _MOST_TOLD else ""
    return CheckpointError(
        f"The checkpoint does not fit {owner}, and {loaded} loaded: {told}{more}. {advice}"
    )


def weights_error(module: nn.Module, misfits: Sequence[str]) -> CheckpointError | None:
    """Return the error of weights that do not fit a module; None where all do."""
    if not misfits:
        return None
    return misfit_error(type(module).__name__, misfits, WEIGHTS_ADVICE)


def length_misfits(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> list[str]:
    """Return the misfit of saved groups with other numbers of parameters; none for the same."""
    lengths = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if lengths == expected:
        return []
    kind = type(optimizer).__name__
    return [
        f"the checkpoint's state of {kind} has groups of {lengths} parameters, expected {expected}"
    ]


def optimizer_misfits(
    saved: Mapping[str, Any],
    optimizer: Optimizer,
    named_shapes: Mapping[nn.Parameter, tuple[str, Sequence[int]]],
) -> list[str]:
    """Return a full optimizer state's misfits with parameters of such names and full shapes."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if not groups:  # it stands for none at all, and takes anything
        return []
    loads_itself = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    if loads_itself and "state" not in saved:  # a form of its own
        return []
    lacking = [key for key in ("state", "param_groups") if key not in saved]
    if lacking:
        return [f"the checkpoint's state of {kind} has no {lacking}"]
    found = length_misfits(saved["param_groups"], optimizer)
    if found or loads_itself:
        return found
    known: set[Any] = set()
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        trials = StateTrials(optimizer, group, saved_group)
        for param, number in zip(group["params"], saved_group["params"], strict=True):
            known.add(number)
            name, shape = named_shapes.get(param, (f"parameter {number}", param.shape))
            entries, trial = saved["state"].get(number, {}), trials.of(param, len(shape))
            found += _misfits(f"{name!r} in the state of {kind}", entries, trial, shape)
    strays = [key for key in saved["state"] if isinstance(key, int) and key not in known]
    if strays:
        found.append(f"the state of {kind} has entries for {strays}, which no group lists")
    return list(dict.fromkeys(found))


def _misfits(owner: str, entries: Any, trial: "TrialState", shape: Sequence[int]) -> Iterator[str]:
    """Yield the misfits of one parameter's entries; an unused parameter has no entries."""
    yield from trial.lacks_options
    if not isinstance(entries, Mapping):
        yield f"the entries of {owner} are a {type(entries).__name__}, expected a dictionary"
    elif entries and trial.state:
        missing = [key for key, value in trial.state.items() if value is not None]
        missing = [key for key in missing if key not in entries]
        if missing and trial.needs(missing):
            yield f"the entries of {owner} are {sorted(entries)}, expected {missing}, too"
        for key, value in entries.items():
            yield from trial.misfits_of(key, f"{key!r} of {owner}", value, shape)


@dataclass(frozen=True)
class TrialState:
    """The state that a trial optimizer makes for a small parameter, and options that it lacks."""

    optimizer: Optimizer | None
    shape: tuple[int, ...]
    state: _State
    lacks_options: Sequence[str] = ()

    def bytes_for(self, numel: int) -> int | None:
        """Return the bytes of the state of a parameter of so many elements; None where unknown."""
        small, tensors = prod(self.shape), [t for t in self.state.values() if isinstance(t, Tensor)]
        if self.optimizer is None or any(one.numel() not in (1, small) for one in tensors):
            return None
        return sum(one.itemsize * (numel if one.numel() == small else 1) for one in tensors)

    def needs(self, keys: Sequence[str]) -> bool:
        """Whether the optimizer cannot take a step without these entries of its state."""
        assert self.optimizer is not None
        (param,) = self.optimizer.param_groups[0]["params"]
        rest = {key: value for key, value in self.state.items() if key not in keys}
        self.optimizer.state[param] = rest
        try:
            _step(self.optimizer, param)
        except Exception:  # whatever it raises, a step fails
            return True
        return False

    def misfits_of(self, key: str, what: str, value: Any, full: Sequence[int]) -> Iterator[str]:
        """Yield the misfits of an entry for a parameter of shape `full`."""
        model = self.state.get(key)
        if not isinstance(model, Tensor):
            return
        expected = _grown(tuple(model.shape), self.shape, full)
        if expected is None:
            return
        if not isinstance(value, Tensor):
            if value is not None and not (isinstance(value, Number) and model.numel() == 1):
                yield f"{what} is a {type(value).__name__}, expected a tensor"
        elif value.numel() != 1 or prod(expected) != 1:
            yield from shape_misfits(what, value.shape, expected)
            yield from dtype_misfits(what, value.dtype, model.dtype)


class StateTrials:
    """Trial optimizers with the options of a saved group, one for each kind of parameter."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], saved: Mapping[str, Any]
    ) -> None:
        self._optimizer, self._group, self._saved = optimizer, group, saved
        self._made: dict[tuple[int, torch.dtype], TrialState] = {}

    def of(self, param: Tensor, ndim: int) -> TrialState:
        """Return the trial optimizer for parameters of a format and of `ndim` dimensions."""
        kind = ndim, param.dtype
        if kind not in self._made:
            with torch.random.fork_rng(devices=[]):
                self._made[kind] = self._make(ndim, param)
        return self._made[kind]

    def _make(self, ndim: int, like: Tensor) -> TrialState:
        shape = _SIZES[:ndim]
        is_trained = like.is_floating_point() or like.is_complex()
        if len(shape) < ndim or not is_trained:  # integers, which are frozen
            return TrialState(None, (), {})
        param = nn.Parameter(torch.ones(shape, dtype=like.dtype, device=like.device))
        try:
            trial = trial_optimizer(self._optimizer, {**self._group, "params": [param]})
            trial.load_state_dict({"state": {}, "param_groups": [{**self._saved, "params": [0]}]})
            _step(trial, param)
        except KeyError as error:
            (key,) = error.args
            lacks = key in self._group and key not in self._saved
            told = (
                f"a group of {type(self._optimizer).__name__} has the options "
                f"{sorted(self._saved)}, expected {key!r}, too"
            )
            return TrialState(None, shape, {}, [told] if lacks else [])
        except Exception:  # it takes what it does not take from a trial optimizer
            return TrialState(None, shape, {})
        return TrialState(trial, shape, dict(trial.state[param]))


def _step(optimizer: Optimizer, param: nn.Parameter) -> None:
    param.grad = torch.full_like(param, 0.5)
    type(optimizer).step(optimizer)


def _grown(
    shape: tuple[int, ...], small: tuple[int, ...], full: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the shape that belongs to a parameter of shape `full` as `shape` does to `small`."""
    if shape == small:
        return tuple(full)
    if prod(shape) == 1:
        return ()
    if all(size == 1 or size in small for size in shape):
        return tuple(1 if size == 1 else full[small.index(size)] for size in shape)
    return None
