"""Applies a pipeline step's changes of the module's plain attributes on every rank alike.

    step          last stage                          other stages
    microbatch 0  self.losses.append(a)  ──> taken    cut short before that line,
    microbatch 1  self.losses.append(b)  ──> taken    or put back
    every rank    self.losses == [..., mean of a and b by size]     once per batch

The step of a microbatch is run on each stage, and only on the last one to its end. So the last
stage's changes count; all ranks then apply them to their module, once per batch. Every microbatch
begins with the values of before the batch.
Lists and the new keys of mappings get what one step of the whole batch would have added, numbers
and small tensors become what it would have made of them (see below). So do those of all modules in
the module, the module's own small buffers, and the options of optimizers, as the learning rate.
What a block's forward changes in the block is left to it, as its buffers are: once per microbatch,
on the block's stage. So are the attributes of any module whose buffers a step changes: the place in
a queue goes with the queue.

What one step of the whole batch would have made of a number, from what its microbatches make:

    each begins with 5     makes 6, 6, 6              6      a counter of steps, a learning rate
    of sizes 4, 4, 2       makes 9, 9, 7             15      a counter of samples
                           5 + its loss, three times  5 + the mean of the losses
                           5 + its loss * its size    5 + their sum
                           other numbers              their mean by size, with a warning

Means stay means and sums of samples stay sums where the loss or the number of samples tells which
is which; an average that is kept by hand (0.9 * old + 0.1 * new) is a mean as well.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple
from weakref import ReferenceType

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_shard.core._lightning import own_trainer
from lightning_shard.core.placeholders import Placeholder, is_placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import held_values, map_tensors, tensors_in
from lightning_shard.pipeline_parallel.microbatches import merge_outputs
from lightning_shard.pipeline_parallel.stage_run import running_stage
from lightning_shard.pipeline_parallel.staged_model import MAX_FOLLOWED_NUMEL

Path = tuple[Any, ...]  # the names of a module and an attribute, then keys of mappings in it

_LIGHTNINGS = frozenset(vars(pl.LightningModule())) - {"training"}
_BUFFERS = "_buffers"  # followed by name, though Lightning's
_OPTIMIZERS = None  # in place of a module's name
_MAX_DEPTH = 4  # of mappings in mappings
_GONE = object()


class _Filled(NamedTuple):
    """The items that one batch has added to a list."""

    items: list[Any]
    is_on_cpu: bool


@dataclass
class StepNote:
    """A step's note of its result."""

    loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class BatchChanges:
    """What one batch has changed."""

    filled: dict[Path, _Filled] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # on what a user would not expect


class StepAttributes:
    """Records changes of plain attributes in steps, and maybe own buffers, to apply everywhere."""

    def __init__(self, module: pl.LightningModule, *, buffers_of_first: bool) -> None:
        self._followed, self._buffers_of_first = _Followed(module), buffers_of_first
        self._added: list[tuple[int, dict[Path, list[Any]]]] = []
        self._changed: list[dict[Path, Any]] = []  # by microbatch
        self._notes: list[StepNote] = []
        self._told: set[str] = set()

    @contextmanager
    def step(
        self, size: int, *, counts: bool, completed: Callable[[Any], Any] = lambda value: value
    ) -> Iterator[StepNote]:
        """Run a microbatch's step inside, yield the note for its loss, and put changes back."""
        before, note, run = _Before(self._followed), StepNote(), running_stage()
        if run is not None:
            run.block_context = before.block
        try:
            yield note
            if counts:
                self._note(before, size, completed)
                self._notes.append(note)
        finally:
            before.put_back()

    def find(self) -> None:
        """Find the modules that there are, before a batch's first step."""
        self._followed.find()

    def _note(self, before: "_Before", size: int, completed: Callable[[Any], Any]) -> None:
        is_of_weights = self._followed.is_of_weights
        added = {
            path: [completed(_known(one)) for one in items]
            for path, items in before.take_added().items()
            if not is_of_weights(path, items)
        }
        self._added.append((size, added))
        changed = [one for one in before.changed() if not is_of_weights(*one)]
        self._changed.append({path: _kept(value) for path, value in changed})

    def merged(self) -> BatchChanges:
        """Return what the batch has changed, and forget it."""
        added, changed, notes = self._added, self._changed, self._notes
        self._added, self._changed, self._notes = [], [], []
        parts: defaultdict[Path, list[tuple[int, list[Any]]]] = defaultdict(list)
        for size, lists in added:
            for path, items in lists.items():
                _refuse_placeholder(path, items)
                parts[path].append((size, items))
        filled = {path: _filled(*zip(*some, strict=True)) for path, some in parts.items()}
        return self._merged([size for size, _ in added], changed, notes, filled)

    def _merged(
        self,
        sizes: Sequence[int],
        changed: Sequence[dict[Path, Any]],
        notes: Sequence[StepNote],
        filled: dict[Path, _Filled],
    ) -> BatchChanges:
        paths = list(dict.fromkeys(path for one in changed for path in one))
        losses = [_number(one.loss) for one in notes] if paths else []
        start = dict(_Before(self._followed).values) if paths else {}
        values, remarks = {}, {}
        for path in paths:
            all_values = [one.get(path, start.get(path)) for one in changed]
            elsewhere = [one for one in tensors_in(all_values) if isinstance(one, Placeholder)]
            name = _name(path)
            if elsewhere:
                remarks[name] = _left_as_it_was(name, elsewhere[0])
                continue
            if self._buffers_of_first and path[1] == _BUFFERS:
                values[path] = all_values[0]
                continue
            found = merged(start.get(path), all_values, Microbatches(sizes, losses))
            values[path] = found.value
            if found.assumed:
                remarks[name] = _taken_for(name, found.assumed)
        new = [remark for name, remark in remarks.items() if name not in self._told]
        self._told.update(remarks)
        return BatchChanges(filled=filled, values=values, remarks=new)

    def put(self, changes: BatchChanges) -> None:
        """Apply the batch's changes, as `merged` has returned them; each rank must call."""
        follows = self._followed.follows
        for path in filter(follows, changes.values):
            self._followed.set(path, changes.values[path])
        for path in filter(follows, changes.filled):
            items, is_on_cpu = changes.filled[path]
            container = self._followed.container(path)
            if not isinstance(container.get(path[-1]), list):
                container[path[-1]] = []
            container[path[-1]].extend(map_tensors(items, Tensor.cpu) if is_on_cpu else items)
        for remark in changes.remarks:
            rank_zero_warn(remark)


class _Followed:
    """The attributes of modules that are followed, own buffers, and options of optimizers.

    Modules are open that have a list, a mapping or a tensor, or that have changed in the batch:
    only these are looked at closely. The others have plain values, which are compared as they are.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self.left: set[Path] = set()  # to forwards; or all of a module, by its name
        self.find()

    def find(self) -> None:
        """Find the modules, but metrics and lazy ones, which become another class in a forward."""
        self._homes = {
            name: vars(one)
            for name, one in self._module.named_modules()
            if not isinstance(one, Metric | MetricCollection | LazyModuleMixin)
        }
        kinds = (list, dict, Tensor)  # which can change in place
        self._open = {
            name
            for name, home in self._homes.items()
            if not name
            or any(isinstance(one, kinds) for key, one in home.items() if key not in _LIGHTNINGS)
        }
        self._seen: dict[str, tuple[list[dict[str, Any]], list[Any], list[str]]] = {}
        closed = self._homes.keys() - self._open
        self._plain = {
            name: {key: one for key, one in self._homes[name].items() if key not in _LIGHTNINGS}
            for name in closed
        }
        self._lengths = {name: len(self._homes[name]) for name in closed}
        self._blocks: dict[str, list[str]] = {"": list(self._homes)}
        for name in filter(None, self._homes):
            for block in accumulate(name.split("."), "{}.{}".format):
                self._blocks.setdefault(block, []).append(name)

    def opened(self, block: str = "") -> Sequence[str]:
        """Return the names of open modules in a block, those that have changed among them."""
        if not self._is_as_seen(block):
            names = self._blocks.get(block, [])
            closed = [one for one in names if one not in self._open]
            changed = {one for one in closed if not self._is_plain_still(one)}
            if changed:
                self._open |= changed
                self._seen.clear()
            homes = [self._homes[one] for one in names if one not in self._open]
            values = [*chain.from_iterable(map(dict.values, homes))]
            self._seen[block] = homes, values, [one for one in names if one in self._open]
        return self._seen[block][2]

    def _is_as_seen(self, block: str) -> bool:
        """Whether closed modules have what they had, to the object: most calls end here."""
        homes, values, _ = self._seen.get(block, ([], [_GONE], []))
        now = chain.from_iterable(map(dict.values, homes))
        return sum(map(len, homes)) == len(values) and all(map(operator.is_, now, values))

    def _is_plain_still(self, name: str) -> bool:
        home, before = self._homes[name], self._plain[name]
        now = map(home.get, before, repeat(_GONE))
        return len(home) == self._lengths[name] and all(map(operator.is_, now, before.values()))

    def follows(self, path: Path) -> bool:
        """Whether a path is followed, and not left to a forward."""
        return self.left.isdisjoint((path, path[:1]))

    def is_of_weights(self, path: Path, value: Any) -> bool:
        """Whether a list is of a layer's own weights, as recurrent layers note theirs."""
        if path[0] is _OPTIMIZERS or not isinstance(value, list):
            return False
        own = self._homes[path[0]]["_parameters"].values()
        held = [one() if isinstance(one, ReferenceType) else one for one in value]
        return any(one is param for one in held for param in own if param is not None)

    def versions(self) -> dict[str, list[int | None]]:
        """Return how often the buffers of modules in the module were written to."""
        return {
            name: [_version(one) for one in home[_BUFFERS].values() if one is not None]
            for name, home in self._homes.items()
            if name and home[_BUFFERS]
        }

    def plain(self, name: str) -> dict[Path, Any]:
        """Return the plain values of a module from before the batch."""
        values = self._plain[name].items()
        return {(name, key): one for key, one in values if _is_followed(one)}

    def containers(self, names: Sequence[str]) -> Iterator[tuple[Path, dict[Any, Any]]]:
        """Yield the path of each list and plain value, with the container that holds it."""
        for name in names:
            home = self._homes[name]
            for key in home:
                if key not in _LIGHTNINGS:
                    found = _containers_of((name, key), home)
                    yield from (one for one in found if self.follows(one[0]))
        if "" in names:
            yield from self._others()

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        trainer = own_trainer(self._module)
        return () if trainer is None else trainer.optimizers

    def _others(self) -> Iterator[tuple[Path, dict[Any, Any]]]:
        buffers = self._homes[""][_BUFFERS]
        for name, buffer in buffers.items():
            if isinstance(buffer, Tensor) and _is_followed(buffer):
                yield ("", _BUFFERS, name), buffers
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for name in group:
                    if name != "params" and _is_option(group[name]):
                        yield (_OPTIMIZERS, number, index, name), group

    def container(self, path: Path) -> dict[Any, Any]:
        """Return the container at a path, new where there is none."""
        if path[0] is _OPTIMIZERS:
            group: dict[Any, Any] = self._optimizers[path[1]].param_groups[path[2]]
            return group
        home: dict[Any, Any] = self._homes[path[0]]
        for key in path[1:-1]:
            home = home.setdefault(key, {})
        return home

    def set(self, path: Path, value: Any) -> None:
        """Set a value; a buffer, which others refer to, stays the object that it is."""
        container = self.container(path)
        old = container.get(path[-1])
        if path[1] == _BUFFERS and isinstance(old, Tensor) and old.shape == value.shape:
            old.data.copy_(value)
        else:
            container[path[-1]] = value


class _Before:
    """The plain attributes of modules as they were before a step, or before a block in it."""

    def __init__(self, followed: _Followed, block: str = "") -> None:
        self._followed, self._block = followed, block
        names = followed.opened(block)
        self._names = set(names)
        self._versions = {} if block else followed.versions()
        self.values: dict[Path, Any] = {}
        self._sizes: dict[Path, int] = {}
        self._tensors: dict[Path, tuple[int | None, Tensor]] = {}
        for path, container in followed.containers(names):
            value = self.values[path] = container[path[-1]]
            if isinstance(value, list):
                self._sizes[path] = len(value)
            elif isinstance(value, Tensor) and not isinstance(value, Placeholder):
                self._tensors[path] = _version(value), value.clone().detach()

    def _containers(self) -> list[tuple[Path, dict[Any, Any]]]:
        """Return what there is now; modules that are open only now had plain values before."""
        for name, now in self._followed.versions().items() if self._versions else ():
            if now != self._versions.get(name, now):
                self._followed.left.add((name,))
        names = self._followed.opened(self._block)
        for name in set(names) - self._names:
            self._names.add(name)
            self.values.update(self._followed.plain(name))
        return list(self._followed.containers(names))

    def _walk(self) -> Iterator[tuple[Path, Any]]:
        for path, container in self._containers():
            yield path, container[path[-1]]

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Run a block inside, to whose forward all that it changes there is left."""
        before = _Before(self._followed, name)
        yield
        self._followed.left.update([path for path, _ in before.changed()])

    def put_back(self) -> None:
        """Undo the changes since."""
        for path, container in self._containers():
            if path in self.values:
                self._put_back(path, container)
            else:
                del container[path[-1]]

    def _put_back(self, path: Path, container: dict[Any, Any]) -> None:
        value = container[path[-1]] = self.values[path]
        if isinstance(value, list):
            del value[self._sizes[path] :]
        elif path in self._tensors:
            version, copy = self._tensors[path]
            if version is None or _version(value) != version:
                value.data.copy_(copy)

    def take_added(self) -> dict[Path, list[Any]]:
        """Remove the items that lists have got since, and new lists, and return them."""
        added = {}
        for path, container in self._containers():
            value, size = container[path[-1]], self._sizes.get(path, 0)
            if isinstance(value, list) and len(value) > size and self._continues(path, value):
                added[path] = value[size:]
                del value[size:]
                if path not in self.values:
                    del container[path[-1]]
        return added

    def _continues(self, path: Path, value: list[Any]) -> bool:
        """Whether a list is the earlier one, or a new one that begins with its items."""
        old = self.values.get(path)
        if old is value or not isinstance(old, list):
            return True
        begins = all(one is other for one, other in zip(old, value, strict=False))
        return begins and not any(is_placeholder(one) for one in tensors_in(value))

    def changed(self) -> Iterator[tuple[Path, Any]]:
        """Yield the paths of values that have changed, and of lists that do not go on; and them."""
        for path, value in self._walk():
            if isinstance(value, list):
                size = self._sizes.get(path, 0)
                is_long = len(value) == size if self._block else len(value) >= size
                is_same = is_long and self._continues(path, value)
            else:
                is_same = path in self.values and value is self.values[path]
            if is_same and path in self._tensors:
                version, copy = self._tensors[path]
                is_same = version == _version(value)
                if version is None:
                    is_same = torch.equal(copy, value)
            if not is_same:
                yield path, value


def _name(path: Path) -> str:
    """Return what a path leads to as user code writes it."""
    if path[0] is _OPTIMIZERS:
        return f"{path[3]!r} of the optimizer's param_groups[{path[2]}]"
    module, name, *keys = (one for one in path if one != _BUFFERS)
    owner = f"self.{module}" if module else "self"
    return f"{owner}.{name}" + "".join(f"[{key!r}]" for key in keys)


def _kept(value: Any) -> Any:
    """Return a copy of a changed value, which is about to be put back."""
    copied = list(value) if isinstance(value, list) else value
    return map_tensors(
        copied, lambda one: one if isinstance(one, Placeholder) else one.clone().detach()
    )


def _number(loss: Tensor | None) -> float | None:
    return float(loss) if loss is not None and loss.numel() == 1 else None


def _is_option(value: Any) -> bool:
    """Whether an optimizer's option is followed: as attributes are, and pairs of numbers."""
    if isinstance(value, tuple):
        return all(isinstance(one, int | float) for one in value)
    return _is_followed(value) and not isinstance(value, list)


def _containers_of(path: Path, container: dict[Any, Any]) -> Iterator[tuple[Path, dict[Any, Any]]]:
    value = container[path[-1]]
    if isinstance(value, dict):
        for key in value if len(path) < _MAX_DEPTH else ():
            if isinstance(key, str | int | float):
                yield from _containers_of((*path, key), value)
    elif _is_followed(value):
        yield path, container


def _is_followed(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= MAX_FOLLOWED_NUMEL and not value.is_sparse
    return value is None or isinstance(value, list | bool | int | float | str)


def _known(item: Any) -> Any:
    """Return an added item, out of the graph, with the values that are known now."""

    def value_of(tensor: Tensor) -> Tensor:
        known = tensor.value if isinstance(tensor, Placeholder) else None
        return (tensor if known is None else known).detach()

    return map_tensors(item, value_of)


def _refuse_placeholder(path: Path, items: list[Any]) -> None:
    for tensor in tensors_in(items):
        if isinstance(tensor, Placeholder):
            raise ConfigError(
                f"The step adds a value of shape {tuple(tensor.shape)} to {_name(path[:2])} that "
                f"is computed from {tensor.origin!r}, which another stage of the pipeline holds; "
                f"expected what the last stage has, for every rank's list gets it. Add what is "
                f"computed from the last blocks, the step's result or the batch, or use "
                f"strategy='zero3'."
            )


def _taken_for(name: str, assumed: str) -> str:
    return (
        f"A step changes {name} by what each microbatch of a pipeline gives, from the same value, "
        f"and it was taken for {assumed}. Where one step of the whole batch would make something "
        f"else of it, change it in on_train_batch_end, or set num_microbatches=1."
    )


def _left_as_it_was(name: str, elsewhere: Placeholder) -> str:
    return (
        f"A step changes {name} to a value that is computed from {elsewhere.origin!r}, which "
        f"another stage of the pipeline holds, and it stays as it was on every rank. Where "
        f"something reads it after the step, set what is computed from the last blocks, the step's "
        f"result or the batch, or use strategy='zero3'."
    )


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for one that does not count writes."""
    return None if tensor.is_inference() else tensor._version


def _filled(sizes: Sequence[int], parts: Sequence[list[Any]]) -> _Filled:
    """Merge the items that microbatches have added to a list into those of one step."""
    one_each = all(len(part) == 1 for part in parts)
    if one_each and (max(sizes) > 1 or all(_is_full(part[0]) for part in parts)):
        items = [merge_outputs([part[0] for part in parts], list(sizes))]
    else:
        items = list(merge_outputs(list(parts), list(sizes)))
    tensors = tensors_in(items)
    return _Filled(items, bool(tensors) and all(one.device.type == "cpu" for one in tensors))


def _is_full(item: Any) -> bool:
    """Whether the item that a one-sample microbatch adds is a step's: a loss, a tensor (1, ...)."""
    # Any other item may be the one sample's, as of `self.texts.extend(texts)`.
    if isinstance(item, Tensor):
        return item.ndim == 0 or item.shape[0] == 1
    return isinstance(item, int | float) or held_values(item) is not None


class Merged(NamedTuple):
    """What a batch has made of a value."""

    value: Any
    assumed: str = ""


class Microbatches(NamedTuple):
    """What is known of the microbatches of one batch."""

    sizes: Sequence[int]
    losses: Sequence[float | None]

    @property
    def are_single_samples(self) -> bool:
        """Whether a sum over samples and one over microbatches are the same."""
        return max(self.sizes) == 1


def merged(start: Any, values: Sequence[Any], parts: Microbatches) -> Merged:
    """Merge what microbatches have made of one value, each from the same start."""
    if len(values) == 1:
        return Merged(values[0])
    if all(map(_is_whole, values)):
        return _merged_whole(start, values, parts)
    if all(_same(one, values[0]) for one in values[1:]):
        return Merged(values[0])
    if all(map(_is_real, values)) and len({_shape(one) for one in values}) == 1:
        return _merged_real(start, values, parts)
    if all(isinstance(one, list) for one in values) and len(set(map(len, values))) == 1:
        items = [merged(None, each, parts) for each in zip(*values, strict=True)]
        assumed = next((one.assumed for one in items if one.assumed), "")
        return Merged([one.value for one in items], assumed)
    return Merged(values[-1], "the value after the last microbatch")


def _merged_whole(start: Any, values: Sequence[Any], parts: Microbatches) -> Merged:
    are_equal = all(_same(one, values[0]) for one in values[1:])
    if not _is_whole(start):
        if are_equal:
            return Merged(values[0])
        return Merged(values[-1], "the value after the last microbatch")
    deltas = [one - start for one in values]
    of_samples = all(
        _same(delta, _like(delta, size)) for delta, size in zip(deltas, parts.sizes, strict=True)
    )
    if of_samples and not parts.are_single_samples:
        return Merged(start + sum(deltas))
    if are_equal:
        return Merged(values[0], "a count of batches" if of_samples else "")
    return Merged(start + sum(deltas), "the sum of what each microbatch adds")


def _merged_real(start: Any, values: Sequence[Any], parts: Microbatches) -> Merged:
    begin = start if _is_real(start) and _shape(start) == _shape(values[0]) else 0.0
    deltas = [one - begin for one in values]
    pairs = zip(parts.losses, parts.sizes, strict=True)
    adds_sums = _follow(deltas, [None if one is None else one * size for one, size in pairs])
    if adds_sums and not parts.are_single_samples:
        return Merged(begin + sum(deltas))
    is_certain = not adds_sums and (_follow(deltas, parts.losses) or _follow(values, parts.losses))
    return Merged(_mean(values, parts.sizes), "" if is_certain else "a mean over samples")


def _follow(values: Sequence[Any], losses: Sequence[float | None]) -> bool:
    """Whether each value is its microbatch's loss, up to rounding."""
    return all(
        loss is not None and _shape(one) == () and abs(float(one) - loss) <= 1e-4 * abs(loss) + 1e-8
        for one, loss in zip(values, losses, strict=True)
    )


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the mean weighted by size, added up in float64."""
    total = sum(sizes)
    if not isinstance(values[0], Tensor):
        return sum(one * size for one, size in zip(values, sizes, strict=True)) / total
    wide = sum(one.double() * size for one, size in zip(values, sizes, strict=True))
    assert isinstance(wide, Tensor)
    return (wide / total).to(values[0].dtype)


def _like(value: Any, number: int) -> Any:
    return torch.full_like(value, number) if isinstance(value, Tensor) else number


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and bool(torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # arrays and tables compare their elements
        return one is other


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _is_real(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else type(value) is float


def _is_whole(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return type(value) is int
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
