"""Applies a pipeline step's changes of the module's plain attributes on every rank alike.

    step          last stage                          other stages
    microbatch 0  self.losses.append(a)  ──> taken    cut short before that line,
    microbatch 1  self.losses.append(b)  ──> taken    or put back
    every rank    self.losses == [..., mean of a and b by size]     once per batch

The step of a microbatch is run on each stage, and only on the last one to its end. So the last
stage's changes count; all ranks then apply them to their module, once per batch.
Lists and the new keys of mappings get what one step of the whole batch would have added; numbers
and small tensors, like a running sum, are those after the last microbatch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.leaves import map_tensors, tensors_in
from lightning_shard.pipeline_parallel.microbatches import held_values, merge_outputs
from lightning_shard.placeholders import Placeholder, is_placeholder

Path = tuple[Any, ...]  # the name of an attribute, then keys of mappings in it

_LIGHTNINGS = frozenset(vars(pl.LightningModule()))
_MAX_DEPTH = 4  # of mappings in mappings
_MAX_NUMEL = 64  # of a tensor that is shared as an attribute: it costs no message of its own


class _Filled(NamedTuple):
    """The items that one batch has added to a list.

    Attributes:
        items: The added items, in order.
        is_on_cpu: Whether the tensors among the items were on the CPU.
    """

    items: list[Any]
    is_on_cpu: bool


class StepAttributes:
    """Records the changes that steps make to a module's plain attributes, to apply them everywhere.

    Args:
        module: Module whose lists, mappings, numbers and small tensors are followed; attributes
            that Lightning has made are not.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._home = vars(module)
        self._added: list[tuple[int, dict[Path, list[Any]]]] = []
        self._changed: dict[Path, None] = {}

    @contextmanager
    def step(
        self, size: int, *, counts: bool, completed: Callable[[Any], Any] = lambda value: value
    ) -> Iterator[None]:
        """Run the step of one microbatch on one stage inside.

        Args:
            size: Number of samples of the microbatch.
            counts: Whether the step is the last stage's; other stages' changes are undone.
            completed: Turns added values into ones that other ranks can take.

        """
        before = _Before(self._home)
        is_over = False
        try:
            yield
            is_over = True
        finally:
            if not (counts and is_over):
                before.put_back()
        if counts:
            added = before.take_added()
            self._changed |= dict.fromkeys(before.changed())
            taken = {
                path: [completed(_known(one)) for one in items] for path, items in added.items()
            }
            self._added.append((size, taken))

    def merged(self) -> tuple[dict[Path, _Filled], dict[Path, Any]]:
        """Return the batch's additions to each list, and the values that it has changed.

        Raises:
            ConfigError: A value that another stage has was added to a list.
        """
        added, changed = self._added, self._changed
        self._added, self._changed = [], {}
        now = dict(_walk(self._home))
        parts: defaultdict[Path, list[tuple[int, list[Any]]]] = defaultdict(list)
        for size, lists in added:
            for path, items in lists.items():
                _refuse_placeholder(path, items)
                parts[path].append((size, items))
        filled = {path: _filled(*zip(*some, strict=True)) for path, some in parts.items()}
        values = {path: now[path] for path in changed if path in now}
        return filled, {
            path: map_tensors(value, Tensor.detach)
            for path, value in values.items()
            if not any(isinstance(one, Placeholder) for one in tensors_in(value))
        }

    def put(self, filled: dict[Path, _Filled], values: dict[Path, Any], *, is_source: bool) -> None:
        """Apply the batch's changes to this rank's module; each rank must call.

        Args:
            filled: Items added to lists, as `merged` has returned them on the last stage.
            values: Changed values, as `merged` has returned them; the last stage has them.
            is_source: Whether this rank has the last stage.
        """
        for path, value in () if is_source else values.items():
            self._container(path)[path[-1]] = value
        for path, (items, is_on_cpu) in filled.items():
            container = self._container(path)
            if not isinstance(container.get(path[-1]), list):
                container[path[-1]] = []
            container[path[-1]].extend(map_tensors(items, Tensor.cpu) if is_on_cpu else items)

    def _container(self, path: Path) -> dict[Any, Any]:
        home = self._home
        for key in path[:-1]:
            home = home.setdefault(key, {})
        return home


class _Before:
    """The plain attributes of a module as they were before a step."""

    def __init__(self, home: dict[str, Any]) -> None:
        self._home = home
        self._values = dict(_walk(home))
        self._sizes = {
            path: len(one) for path, one in self._values.items() if isinstance(one, list)
        }
        self._tensors = {
            path: (_version(one), one.detach().clone())
            for path, one in self._values.items()
            if isinstance(one, Tensor) and not isinstance(one, Placeholder)
        }

    def put_back(self) -> None:
        """Undo the changes since."""
        for path, container in list(_containers(self._home)):
            if path in self._values:
                self._put_back(path, container)
            else:
                del container[path[-1]]

    def _put_back(self, path: Path, container: dict[Any, Any]) -> None:
        value = container[path[-1]] = self._values[path]
        if isinstance(value, list):
            del value[self._sizes[path] :]
        elif path in self._tensors:
            version, copy = self._tensors[path]
            if version is None or _version(value) != version:
                value.data.copy_(copy)

    def take_added(self) -> dict[Path, list[Any]]:
        """Remove the items that lists have got since, and new lists, and return them."""
        added = {}
        for path, container in list(_containers(self._home)):
            value, size = container[path[-1]], self._sizes.get(path, 0)
            if isinstance(value, list) and len(value) > size and self._continues(path, value):
                added[path] = value[size:]
                del value[size:]
                if path not in self._values:
                    del container[path[-1]]
        return added

    def _continues(self, path: Path, value: list[Any]) -> bool:
        """Whether a list is the earlier one, or a new one that begins with its items."""
        old = self._values.get(path)
        if old is value or not isinstance(old, list):
            return True
        begins = all(one is other for one, other in zip(old, value, strict=False))
        return begins and not any(is_placeholder(one) for one in tensors_in(value))

    def changed(self) -> Iterator[Path]:
        """Yield the paths of values that have changed, and of lists that do not go on."""
        for path, value in _walk(self._home):
            if isinstance(value, list):
                is_same = len(value) >= self._sizes.get(path, 0) and self._continues(path, value)
            else:
                is_same = path in self._values and value is self._values[path]
            if is_same and path in self._tensors:
                version, _ = self._tensors[path]
                is_same = version is not None and version == _version(value)
            if not is_same:
                yield path


def _walk(home: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for path, container in _containers(home):
        yield path, container[path[-1]]


def _containers(home: dict[str, Any]) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """Yield the path of each list and plain value, with the container that holds it."""
    for name in home:
        if name not in _LIGHTNINGS:
            yield from _containers_of((name,), home)


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
        return value.numel() <= _MAX_NUMEL and not value.is_sparse
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
                f"The step adds a value of shape {tuple(tensor.shape)} to self.{path[0]} that is "
                f"computed from {tensor.origin!r}, which another stage of the pipeline holds; "
                f"expected what the last stage has, for every rank's list gets it. Add what is "
                f"computed from the last blocks, the step's result or the batch, or use "
                f"strategy='zero3'."
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
    """Whether the item that a one-sample microbatch adds is a step's: a loss, a tensor (1, ...).

    Any other item may be the one sample's, as of `self.texts.extend(texts)`.
    """
    if isinstance(item, Tensor):
        return item.ndim == 0 or item.shape[0] == 1
    return isinstance(item, int | float) or held_values(item) is not None
