"""What stops a deep copy: where it stands, and iterators, which Python may be unable to copy.

A copy that fails leaves its way in the traceback, a frame of `copy.deepcopy` for each object:

    deepcopy(model)  ->  deepcopy(its attributes)  ->  deepcopy(a list)  ->  deepcopy(a socket)
    model                .sources                      [0]                   , a socket,

So the object is named. If it is a generator or another iterator that cannot be copied, its holder
gets one that can be: each copy gives every item, whichever rank is the first to ask for it.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_TABLES = ("_parameters", "_buffers", "_modules")


def way_of(error: Exception) -> list[Any]:
    """Return the objects whose deep copy an error has ended, from the outermost to the culprit."""
    way, trace = list[Any](), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            way.append(trace.tb_frame.f_locals["x"])
        trace = trace.tb_next
    return way


def name_of(way: list[Any], names: Mapping[int, str], default: str) -> str:
    """Return the dotted name of a way's last object, from the last one on that has a name by id."""
    start = max((i for i, one in enumerate(way) if id(one) in names), default=None)
    if start is None:
        return default
    name, is_state = names[id(way[start])], False
    for holder, held in itertools.pairwise(way[start:]):
        found = [key for key, value in _entries(holder) if value is held]
        if found and found[0] not in _TABLES:
            is_item = isinstance(holder, (Mapping, list, tuple)) and not is_state
            name += f"[{found[0]!r}]" if is_item else f".{found[0]}"
        is_state = not found or found[0] in _TABLES  # what holds an object's attributes
    return f"{name}, a {type(way[-1]).__name__},"


def _entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(holder, Mapping):
        return list(holder.items())
    if isinstance(holder, (list, tuple)):
        return enumerate(holder)
    return list(getattr(holder, "__dict__", {}).items())


class _Stream(Iterator[Any]):
    """An iterator whose copies go on where it stands, each through all the items."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Stream":
        return _Stream(copy.copy(self._items))


def exchange_iterator(way: list[Any]) -> Any:
    """Give the holder of the iterator that has ended a deep copy one that can be copied.

    Returns:
        The iterator that was exchanged; None if there is none, or its holder cannot be changed.
    """
    for depth in range(len(way) - 1, 0, -1):
        iterator = way[depth]
        if isinstance(iterator, tuple):  # what an iterator over it is made of
            continue
        if not isinstance(iterator, Iterator):
            return None
        places = [(one, key) for one in way[:depth] for key, it in _entries(one) if it is iterator]
        stream = _Stream(itertools.tee(iterator, 1)[0])
        for holder, key in places:
            if isinstance(holder, (dict, list)):
                holder[key] = stream
            elif not isinstance(holder, tuple):
                object.__setattr__(holder, key, stream)
        if any(not isinstance(holder, tuple) for holder, _ in places):
            return iterator
    return None
