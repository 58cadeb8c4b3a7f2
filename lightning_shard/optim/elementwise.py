"""Does an optimizer treat each element, or each parameter, by itself? A trial of it tells.

A rank updates 1-D shards of parameters. Adam does to a shard what it would do to it inside the
matrix; Muon, Adafactor, LAMB or LBFGS do not, and would be wrong without a word. So a trial
optimizer with the same settings takes two steps on a small matrix and on the same matrix in shards,
and the results are compared. Where ranks have some parameters each, and those full, the trial has
two matrices, together and one by one: only LBFGS and its like fail that.

Optimizers that are not torch's own may treat large tensors in another way, or begin with norms
after some steps. They take more steps, also on a tensor of each number of dimensions that a param
group has, and are compared step by step in float64, with what they keep: an update by 1e-8 tells of
a norm as well as a large one does, and so does a number that is not used yet. No number of steps
tells that nothing else comes after a warm-up, so their trial goes on beside the run: one step
before each of theirs, with the options and counters that they have by now, at a fixed rate, since a
rate of zero would hide everything, and at the optimizer's own.

Methods of an optimizer that work with its state and its weights are called between two steps.

    optimizer.eval()     p.lerp_(state["z"], ...)     schedule-free ones show their averaged weights
    optimizer.backup_and_load_cache()                 lookahead shows its slow ones

Between steps weights look full and state is a rank's shards. A method that a trial finds to do the
same to parts as to a whole runs on shards, in the optimizer's view, as a step does; others are
called as they are, with a warning. The class gets the method that decides, since Lightning and
Fabric wrap optimizers in classes that derive from it.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard.checkpoint.misfits import trial_optimizer
from lightning_shard.core.comparing import is_close
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import has_parts
from lightning_shard.data_parallel.optimizer_entries import flattened, of_parameters
from lightning_shard.errors import ConfigError

Parts = Callable[[Tensor], list[list[Tensor]]]
Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

_RELATIVE = 1e-5  # of the largest of what is compared
_ROUNDING = {True: 3e-7, False: 1e-15}  # of a value, where a step has written float32, and else


@dataclass(frozen=True)
class OptimizerSnapshot:
    """What optimizers hold after a step, or before the first; several are parts of one.

    Attributes:
        values: All elements of the parameters, in order, shape (n,), float64.
        numbers: Numbers by name, of each parameter, or of each optimizer: D-Adaptation's `d`.
    """

    values: Tensor
    elements: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Tensor] = field(default_factory=dict)


def snapshot(runs: Sequence[Optimizer]) -> OptimizerSnapshot:
    """Return what optimizers hold now, each of which has one group."""
    elements: dict[str, list[Tensor]] = {}
    numbers: dict[str, list[Tensor]] = {}
    values = []
    for run in runs:
        for param in run.param_groups[0]["params"]:
            values.append(_flat(param))
            for name, value in flattened(run.state.get(param, {})).items():
                if isinstance(value, Tensor) and value.shape == param.shape and value.ndim:
                    _add(elements, name, value)
                else:
                    _add(numbers, name, value)
        for name, value in _own(run):
            _add(numbers, name, value)
    joined = ({name: torch.cat(held) for name, held in one.items()} for one in (elements, numbers))
    return OptimizerSnapshot(torch.cat(values), *joined)


def _own(run: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps that is no parameter's."""
    group = run.param_groups[0]
    others = {key: value for key, value in run.state.items() if not isinstance(key, Tensor)}
    for place, held in (("group", group), ("optimizer", vars(run)), ("state", others)):
        for name, value in held.items():
            entries = value if place == "state" and isinstance(value, dict) else {"": value}
            for entry, one in entries.items():
                yield f"{place} {name} {entry}", one


def _add(found: dict[str, list[Tensor]], name: Any, value: Any) -> None:
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse:
        found.setdefault(str(name), []).append(_flat(value))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64, copy=True).flatten()


@dataclass(frozen=True)
class Step:
    """One step of a whole, or of its parts."""

    before: OptimizerSnapshot
    after: OptimizerSnapshot

    @property
    def update(self) -> Tensor:
        """The change of each element."""
        return self.after.values - self.before.values

    @property
    def is_finite(self) -> bool:
        """Whether the step has led to numbers."""
        return bool(self.update.isfinite().all())

    @property
    def rounding(self) -> float:
        """By how much elements may differ that were computed alike."""
        written = self.after.values
        is_narrow = torch.equal(written, written.float().double())
        return _ROUNDING[is_narrow] * float(self.before.values.abs().max())


class TrialError(Exception):
    """What an optimizer has raised in a trial, and nothing else has; of parts if no whole did."""

    def __init__(self, cause: Exception, *, of_parts: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.of_parts = of_parts


class Runs:
    """Trials of an optimizer on a whole and on its parts, which take the same steps."""

    def __init__(
        self, optimizer: Optimizer, options: Mapping[str, Any], parts: Parts, weight: Tensor
    ) -> None:
        def make(_: int, values: Sequence[Tensor]) -> None:
            params = [torch.nn.Parameter(value.clone()) for value in values]
            self.optimizers.append(trial_optimizer(optimizer, {**options, "params": params}))

        self.optimizers: list[Optimizer] = []
        self._step: Callable[..., Any] = type(optimizer).step
        self._parts, self._weight = parts, weight
        self._in_each(weight, make)
        self._held = self._snapshots()

    def step(self, grad: Tensor, loss: Loss | None) -> tuple["Step", "Step"]:
        """Take a step on the whole, which has this gradient, and on its parts; return both."""

        def take(number: int, grads: Sequence[Tensor]) -> None:
            run = self.optimizers[number]
            params = run.param_groups[0]["params"]

            def closure() -> Tensor:
                for param, one in zip(params, grads, strict=True):
                    param.grad = one.clone()
                return (loss or same_loss)(params, grads)

            closure()
            self._step(run, *([] if loss is None else [closure]))

        self._in_each(grad, take)
        return self._taken()

    def call(self, name: str) -> tuple["Step", "Step"]:
        """Call a method of the whole's optimizer and of the parts'; see `step`."""
        self._in_each(self._weight, lambda number, _: getattr(self.optimizers[number], name)())
        return self._taken()

    def _taken(self) -> tuple["Step", "Step"]:
        before, self._held = self._held, self._snapshots()
        whole, parts = (Step(*one) for one in zip(before, self._held, strict=True))
        return whole, parts

    def _in_each(self, tensor: Tensor, do: Callable[[int, Sequence[Tensor]], None]) -> None:
        for number, one in enumerate(self._parts(tensor)):
            try:
                do(number, one)
            except Exception as error:  # an optimizer raises what it likes
                raise TrialError(error, of_parts=number > 0) from error

    def _snapshots(self) -> list[OptimizerSnapshot]:
        """Return what the whole holds, and what the parts do."""
        return [snapshot(self.optimizers[:1]), snapshot(self.optimizers[1:])]


def same_loss(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss that is the same on all ranks, as an optimizer is given it (`mean_loss`)."""
    return params[0].new_ones(())


def are_steps_alike(whole: Step, parts: Step) -> bool:
    """Whether parts were changed as the whole was, and keep what it keeps, but for rounding."""
    expected, got = whole.update, parts.update
    if not (whole.is_finite and parts.is_finite):
        return torch.equal(expected.isfinite(), got.isfinite())
    if not is_close(got, expected, _RELATIVE, whole.rounding):
        return False
    both = whole.after.elements.keys() & parts.after.elements.keys()
    held = [(parts.after.elements[name], whole.after.elements[name]) for name in both]
    if not all(is_close(*one, _RELATIVE, 1e-12) for one in held if len(one[0]) == len(one[1])):
        return False
    pairs = ((one, parts.after.numbers.get(key)) for key, one in whole.after.numbers.items())
    return all(other is None or _are_numbers_alike(other, one) for one, other in pairs)


def _are_numbers_alike(got: Tensor, expected: Tensor) -> bool:
    """Whether numbers are the same; those of one whole parameter are those of each part."""
    if len(expected) not in (1, len(got)):
        return True  # vectors, of rows say: what is made of them shows in the updates
    return all(
        is_close(one, other, _RELATIVE, 1e-15)
        for one, other in zip(got, expected.expand(len(got)), strict=True)
    )


_SHAPE = (4, 6)
_LARGEST = {2: (256, 256)}  # thresholds are seldom above; its shapes of more dimensions follow
_LARGEST_OF_MORE = (48, 48, 7, 7, 7)
_LR = 1e-2
_NUM_STEPS, _MORE_STEPS, _MANY_STEPS = 2, 6, 60  # of torch's own, of others, of a small matrix
_SCALES = (1.0, 1.0, 1e-3, 1e3, 1.0)  # of gradients: what depends on their size shows at some
_UNTRIED = {"params", "param_names", "lr", "initial_lr"}  # of a group: they decide nothing

_tried: dict[tuple[Any, ...], str | None] = {}  # what came of trials of torch's own

RAISED = "a trial step raised "
_STILL = "a trial step has moved nothing"
DIFFERENCE = "in a trial, the parts of a whole came out differently from the whole"
_LATER_SCALES = (1.0, 1e-3, 1e3)  # what depends on the size of a gradient shows at some


def why_not_elementwise(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None
) -> str | None:
    """Say why an optimizer's update of a shard differs from its update of the full parameter."""
    return why_not(optimizer, groups, in_shards)


def why_not_separate(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None
) -> str | None:
    """Say why an optimizer updates some of the full parameters differently than all of them."""
    return why_not(optimizer, groups, one_by_one)


def needs_full_parameters(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer updates the full parameters of a group each by itself, but no shards."""
    is_elementwise = why_not_elementwise(optimizer, [group]) is None
    return not is_elementwise and why_not_separate(optimizer, [group]) is None


def why_not(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]] | None,
    parts: Parts,
    kind: type["Runs"] | None = None,
) -> str | None:
    """Say why an optimizer does something else to parts; see `why_not_elementwise`."""
    if _sends_messages(optimizer):
        return (
            "its step sends messages between ranks itself, as if each had all gradients; one "
            "that is written for a single device can do without"
        )
    tried = optimizer.param_groups if groups is None else groups
    with torch.random.fork_rng(devices=[]):
        reason = _gravest([_try_group(optimizer, group, parts, kind or Runs) for group in tried])
    if reason == _STILL:  # it may want a second parameter
        return None if parts is one_by_one else why_not(optimizer, groups, one_by_one)
    return reason


def _gravest(reasons: Sequence[str | None]) -> str | None:
    """Return the first reason; that nothing has moved counts where there is no other."""
    given = [reason for reason in reasons if reason is not None]
    return next((reason for reason in given if reason != _STILL), next(iter(given), None))


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's own classes."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _sends_messages(optimizer: Optimizer) -> bool:
    """Whether a step names torch.distributed: a trial would wait for other ranks."""
    if is_of_torch(optimizer):
        return False
    step = inspect.unwrap(type(optimizer).step)
    found = getattr(step, "__globals__", {})
    names = getattr(getattr(step, "__code__", None), "co_names", ())
    return any(_is_of_distributed(found.get(name)) for name in names) or (
        "distributed" in names and found.get("torch") is torch
    )


def _is_of_distributed(value: Any) -> bool:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return str(name).startswith("torch.distributed")


def _try_group(
    optimizer: Optimizer, group: dict[str, Any], parts: Parts, kind: type[Runs]
) -> str | None:
    """Try a group; each rank asks it of each fit, so torch's own are tried once per settings."""
    if not is_of_torch(optimizer):
        shapes = [_SHAPE, *_shapes_like(group["params"])]
        return _gravest([_try_shape(optimizer, group, parts, shape, kind) for shape in shapes])
    settings = sorted((key, repr(one)) for key, one in group.items() if key not in _UNTRIED)
    place = _device_of(group), torch.get_default_dtype()
    key = (type(optimizer), type(optimizer).step, parts, *place, *settings)
    if key not in _tried:
        _tried[key] = _try_shape(optimizer, group, parts, _SHAPE, kind)
    return _tried[key]


def _device_of(group: dict[str, Any]) -> torch.device:
    return next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))


def _shapes_like(params: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return a shape for each number of dimensions: the largest parameter's, up to a limit."""
    largest: dict[int, Tensor] = {}
    for param in params:
        if is_lazy(param) or param.ndim < 2 or param.numel() == 0:
            continue
        largest[param.ndim] = max(largest.get(param.ndim, param), param, key=Tensor.numel)
    return [_limited(param.shape) for _, param in sorted(largest.items())]


def _limited(shape: Sequence[int]) -> tuple[int, ...]:
    limits = (*_LARGEST.get(len(shape), _LARGEST_OF_MORE), *[2] * len(shape))
    first, *others = (min(size, limit) for size, limit in zip(shape, limits, strict=False))
    return (max(first, 4), *others)  # each half has a row that is zero, and one that is not


def _try_shape(
    optimizer: Optimizer,
    group: dict[str, Any],
    parts: Parts,
    shape: tuple[int, ...],
    kind: type[Runs],
) -> str | None:
    """Try steps in float64, or in float32 where an optimizer computes in that alone."""
    generator = torch.Generator().manual_seed(0)
    more = _MANY_STEPS if shape == _SHAPE else _MORE_STEPS
    num_steps = _NUM_STEPS if is_of_torch(optimizer) else more
    values = torch.randn(1 + num_steps, *shape, generator=generator)
    values = values.to(_device_of(group))  # of a weight, and of gradients
    values[-1, ::2] = 0  # rows that no sample has reached
    if is_of_torch(optimizer):
        return _try_values(optimizer, group, parts, values, kind)
    for step, grad in enumerate(values[1:]):
        grad.mul_(_SCALES[step % len(_SCALES)])
    reason = _try_values(optimizer, group, parts, values.double(), kind)
    has_raised = reason is not None and reason.startswith(RAISED)
    return _try_values(optimizer, group, parts, values, kind) if has_raised else reason


def _try_values(
    optimizer: Optimizer, group: dict[str, Any], parts: Parts, values: Tensor, kind: type[Runs]
) -> str | None:
    """Try steps without a closure and with one, as a Trainer takes them; some need it."""
    settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
    if "lr" in settings:  # a warm-up may begin at zero, where every optimizer does the same
        settings["lr"] = _LR
    raised, has_moved = list[str](), False
    losses = (None, same_loss) if takes_closure(optimizer) else (None,)
    for loss in losses:
        try:
            are_equal = _are_alike(kind(optimizer, settings, parts, values[0]), values, loss)
            if loss is not None and are_equal is None:  # a line search, say
                falling = kind(optimizer, settings, parts, values[0])
                are_equal = _are_alike(falling, values, _falling_loss)
        except Exception as error:  # whatever it raises, it says why
            is_of_parts = isinstance(error, TrialError) and error.of_parts
            raised.append(f"{'with parts of a whole, ' * is_of_parts}{_raised(error)}")
            continue
        if are_equal is False:
            return DIFFERENCE
        has_moved |= bool(are_equal)
    if len(raised) == len(losses):
        return raised[0]
    return None if has_moved else _STILL


def why_different(trial: Callable[[], Sequence[Sequence[Tensor]]]) -> str | None:
    """Say how a trial's parts differ from its undivided run, or what it raised; None if equal."""
    try:
        expected, got = (torch.cat([one.flatten() for one in run]) for run in trial())
    except Exception as error:  # whatever it raises, it says why
        return _raised(error)
    return None if torch.allclose(got, expected, rtol=1e-5, atol=1e-7) else DIFFERENCE


def _raised(error: Exception) -> str:
    kind = "" if isinstance(error, TrialError) else f"{type(error).__name__}: "
    return f"{RAISED}{kind}{error}"


def in_shards(matrix: Tensor) -> list[list[Tensor]]:
    """Return the matrix and each of its shards as runs of their own: a rank has no other shard."""
    flat = matrix.flatten()
    cut = flat.numel() * 5 // 12  # inside a row
    return [[matrix], [flat[:cut]], [flat[cut:]]]


def in_one_shard(matrix: Tensor) -> list[list[Tensor]]:
    """Return the matrix, and its only shard: there is one rank."""
    return [[matrix], [matrix.flatten()]]


def one_by_one(matrix: Tensor) -> list[list[Tensor]]:
    """Return two matrices, which look like a pair of low rank, in one run, and each in its own."""
    upper, lower = matrix.tensor_split(2)
    second = lower.transpose(0, 1).contiguous()
    return [[upper, second], [upper], [second]]


def _are_alike(runs: Runs, values: Tensor, loss: Loss | None) -> bool | None:
    """Whether each step of the parts does what the whole's does; None where nothing has moved."""
    has_moved = False
    for grad in values[1:]:
        whole, parts = runs.step(grad, loss)
        if not are_steps_alike(whole, parts):
            return False
        if not whole.is_finite:
            break
        has_moved |= bool(whole.update.any())
    return True if has_moved else None


def _falling_loss(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss with these gradients, so that a line search has something to lower."""
    return sum(
        ((param.detach() * grad).sum() for param, grad in zip(params, grads, strict=True)),
        start=params[0].new_zeros(()),
    )


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the first argument of a step is a closure; whoever requires one means that."""
    _, *others = inspect.signature(type(optimizer).step).parameters.values()
    return bool(others) and (others[0].name == "closure" or others[0].default is others[0].empty)


def has_elements_only(group: Mapping[str, Any], engine: DataParallelEngine) -> bool:
    """Whether a rank may update single elements of a group's parameters, and no full ones."""
    if engine.options.stage == 0 and not has_parts(engine.split):
        return False
    known, owned = set(engine.model.parameters()), engine.options.owned
    held = [param for param in group["params"] if param in known]
    return any(param not in owned for param in held) or not held


def parts_here(group: Mapping[str, Any], engine: DataParallelEngine) -> Parts:
    """Return how a rank has the parameters of a group."""
    if not has_elements_only(group, engine):
        return one_by_one
    is_alone = engine.collectives.size == 1 and not engine.split.groups
    is_alone |= any(param in engine.options.blocks for param in group["params"])  # tried before
    return in_one_shard if is_alone else in_shards


class LaterSteps:
    """Tries the steps of one optimizer ahead of it."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._rank = optimizer, engine.collectives.rank
        is_cut = engine.options.stage > 0 or bool(engine.split.groups)
        self._trials = [] if is_of_torch(optimizer) or not is_cut else _trials(optimizer, engine)

    def try_next(self, *, with_closure: bool) -> None:
        """Take one step of each trial."""
        if not self._trials:
            return
        with torch.random.fork_rng(devices=[]):
            try:
                are_equal = all([trial.take_step(with_closure) for trial in self._trials])  # noqa: C419
            except Exception as error:  # what the optimizer raises of itself, where it is no trial
                self._end(_raised(error))
                return
        if not are_equal:
            raise ConfigError(
                f"Rank {self._rank}: from its step {self._trials[0].num_steps} on, "
                f"{type(self._optimizer).__name__} does not update each element or parameter by "
                f"itself ({DIFFERENCE}), but this strategy gives it shards, parts or some of the "
                f"parameters, which would make its updates wrong from now on; the steps before "
                f"came out alike. Use strategy='shard_ddp'."
            )

    def _end(self, raised: str) -> None:
        self._trials = []
        rank_zero_warn(
            f"Later steps of {type(self._optimizer).__name__} cannot be tried on a small matrix "
            f"beside the run ({raised}). If they use norms of a parameter, "
            f"or of several, they are wrong on shards: compare with strategy='shard_ddp'."
        )


def _trials(optimizer: Optimizer, engine: DataParallelEngine) -> list["_Trial"]:
    found: dict[str, _Trial] = {}
    for group in optimizer.param_groups:
        parts = parts_here(group, engine)
        options = {key: value for key, value in group.items() if key != "params"}
        for rate in (_LR, None) if "lr" in group else (None,):
            others = options if rate is None else {**options, "lr": rate}
            key = f"{parts.__name__} {rate} {sorted(others.items(), key=str)}"
            if key not in found:
                found[key] = _Trial(optimizer, group, parts, rate)
    return [*found.values()]


class _Trial:
    """An optimizer's steps on a small matrix, and on the same matrix in parts."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], parts: Parts, rate: float | None
    ) -> None:
        self._optimizer, self._group, self._parts = optimizer, group, parts
        self._own = {"params"} if rate is None else {"params", "lr"}
        self._rate = rate
        self._generator = torch.Generator().manual_seed(1)
        self._runs: Runs | None = None
        self.num_steps = 0

    def take_step(self, with_closure: bool) -> bool:
        """Take the next step; return whether the parts came out as the whole."""
        values = torch.randn(2, *_SHAPE, generator=self._generator, dtype=torch.float64)
        weight, grad = values.to(_device_of(self._group))
        is_new = self._runs is None
        self._runs = runs = self._runs or Runs(
            self._optimizer, self._options(), self._parts, weight
        )
        self._follow_options(runs.optimizers)
        grad = grad * _LATER_SCALES[self.num_steps % len(_LATER_SCALES)]
        whole, parts = runs.step(grad, same_loss if with_closure else None)
        self.num_steps += 1
        if is_new:  # its state is there now
            self._follow_counters(runs.optimizers)
        if not whole.is_finite:
            self._runs = None  # thousands of steps at this rate lead away: begin again
        return are_steps_alike(whole, parts)

    def _options(self) -> dict[str, Any]:
        options = {key: copy.deepcopy(v) for key, v in self._group.items() if key not in self._own}
        return options if self._rate is None else options | {"lr": self._rate}

    def _follow_options(self, runs: Sequence[Optimizer]) -> None:
        """Take over numbers that schedulers, or steps themselves, have changed."""
        for key, value in self._group.items():
            if key not in self._own and isinstance(value, (int, float, tuple)):
                self._set([run.param_groups[0] for run in runs], key, value)

    def _follow_counters(self, runs: Sequence[Optimizer]) -> None:
        """Count on from where a fit has been resumed."""
        state = self._optimizer.state
        known: dict[str, Any] = next(
            (state[param] for param in self._group["params"] if param in state), {}
        )
        for key, value in known.items():
            states = [entries for run in runs for _, entries in of_parameters(run)]
            if _is_count(value):
                self._set(states, key, value)

    def _set(self, places: Sequence[dict[str, Any]], key: str, value: Any) -> None:
        """Set a value in each run, unless the runs have different ones: those are results."""
        held = [place.get(key) for place in places]
        if all(one is not None and bool(one == held[0]) for one in held):
            for place in places:
                place[key] = copy.deepcopy(value)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
    return is_number and float(value).is_integer()


_RUNNER = "_lightning_shard_own_method"  # on an optimizer
_SHAPE, _NUM_STEPS = (6, 4), 2


class OwnMethods:
    """Runs an optimizer's own methods in a context until `detach`."""

    def __init__(self, optimizer: Optimizer, run: Callable[[Callable[[], Any], str], Any]) -> None:
        self.optimizer, self.run = optimizer, run
        self.obstacles = {} if is_of_torch(optimizer) else _tried_methods(optimizer)
        self.begins_early = not is_of_torch(optimizer) and _begins_early(optimizer)
        if self.obstacles:
            setattr(optimizer, _RUNNER, self)

    def detach(self) -> None:
        """Leave the methods to the class."""
        vars(self.optimizer).pop(_RUNNER, None)


def _deciding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs in the view of the optimizer that it is called of."""

    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner: Any = getattr(self, _RUNNER, None)  # of a wrapper it is that of the optimizer
        is_its = runner is not None and runner.optimizer in (self, getattr(self, "optimizer", None))
        if not is_its or name not in runner.obstacles:  # a trial's copy, say
            return method(self, *args, **kwargs)
        return runner.run(lambda: method(self, *args, **kwargs), runner.obstacles[name])

    return called


def _candidates(optimizer: Optimizer) -> Iterator[tuple[type, str, FunctionType]]:
    """Yield methods beside torch's own that read state and can be called without arguments."""
    for kind in type(optimizer).__mro__:
        if kind is Optimizer:
            return
        for name, found in list(vars(kind).items()):
            if not isinstance(found, FunctionType) or name[:1] == "_" or hasattr(Optimizer, name):
                continue
            written = inspect.unwrap(found)
            _, *others = inspect.signature(written).parameters.values()
            is_free = all(one.default is not one.empty or one.kind in _MORE for one in others)
            if "state" in written.__code__.co_names and is_free:
                yield kind, name, found


_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _tried_methods(optimizer: Optimizer) -> dict[str, str]:
    """Return what is against methods on parts, also after others; their classes learn to ask."""
    found = list(_candidates(optimizer))
    if not found or not optimizer.param_groups:
        return {}
    parts = one_by_one if why_not_elementwise(optimizer) is not None else in_shards
    with torch.random.fork_rng(devices=[]):
        alone = {name: _tried_on(optimizer, parts, [name]) for _, name, _ in found}
        may = [name for name, result in alone.items() if result != DIFFERENCE]
        after = {
            name: [alone[name], *(_tried_on(optimizer, parts, [o, name]) for o in may)]
            for name in may
        }
    for kind, name, method in found:
        if not hasattr(method, "decides"):
            decides = _deciding(name, method)
            decides.decides = True  # type: ignore[attr-defined]
            setattr(kind, name, decides)
    return {name: _verdict(name, after.get(name, [result])) for name, result in alone.items()}


def _verdict(name: str, results: Sequence[str]) -> str:
    """Return what is against a method: a difference, or what it raises whatever was before it."""
    found = DIFFERENCE if DIFFERENCE in results else min(results, key=bool)
    return found and f"{name}, {found}"


def _begins_early(optimizer: Optimizer) -> bool:
    """Whether the weights or the state that a trial's closure finds are others than before it."""
    found: list[tuple[int, Tensor]] = []

    def note(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        run = runs.optimizers[0]
        if params[0] is run.param_groups[0]["params"][0]:
            size = sum(len(entries) for _, entries in of_parameters(run))
            found.append((size, params[0].detach().clone()))
        return same_loss(params, grads)

    if not takes_closure(optimizer) or not optimizer.param_groups:
        return False
    with suppress(TrialError), torch.random.fork_rng(devices=[]):  # a trial of steps tells of it
        runs, values = _runs(optimizer, one_by_one)
        for grad in values[1:]:
            runs.step(grad, note)
    pairs = zip(found[::2], found[1::2], strict=False)  # by the trial, and by the step
    return any(one[0] != two[0] or not torch.equal(one[1], two[1]) for one, two in pairs)


def _runs(optimizer: Optimizer, parts: Parts) -> tuple[Runs, Tensor]:
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    values = torch.randn(1 + _NUM_STEPS, *_SHAPE, generator=torch.Generator().manual_seed(0))
    values = values.double()
    return Runs(optimizer, settings, parts, values[0]), values


def _tried_on(optimizer: Optimizer, parts: Parts, names: Sequence[str]) -> str:
    """Return how methods differ on parts, or what the whole raises; "" where they do the same."""
    raised = ""
    for loss in (None, same_loss):
        try:
            runs, values = _runs(optimizer, parts)
            for grad in values[1:]:
                runs.step(grad, loss)
            same = all(are_steps_alike(*runs.call(name)) for name in names)
            return "" if same else DIFFERENCE
        except TrialError as error:  # it needs a closure, or another method before
            if error.of_parts:
                return DIFFERENCE
            raised = f"in a trial on a small matrix, raised {error}"
    return raised
