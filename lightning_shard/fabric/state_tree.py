"""A state that is saved: a tree of mappings and lists, with objects that have a state in it.

    {"nets": [generator, discriminator], "optimizer": optimizer, "args": {"lr": 0.1}}

Containers without such an object are values like any other.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_shard.errors import CheckpointError

Path = tuple[Any, ...]


class NamedModules(dict[str, nn.Module]):
    """Modules that are saved as one: the parts, by name, of a module that is not here.

    {"generator": generator, "discriminator": discriminator} is saved as the weights of a module
    that has both under these names, such as a `LightningModule`.
    """


def has_state(value: Any) -> bool:
    """Whether an object has a state to be saved: a module, an optimizer, a scheduler ..."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def objects_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each object with a state, and its path: keys and indices."""
    if has_state(tree) and not isinstance(tree, type):
        yield path, tree
        return
    entries: Any = ()
    if isinstance(tree, Mapping):
        entries = tree.items()
    elif isinstance(tree, (list, tuple)):
        entries = enumerate(tree)
    for key, value in entries:
        yield from objects_in(value, (*path, key))


def converted(tree: Any, convert: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the tree with what `convert` makes of each object, and of each `NamedModules`."""
    if isinstance(tree, NamedModules) or (has_state(tree) and not isinstance(tree, type)):
        return convert(path, tree)
    if next(objects_in(tree), None) is None:
        return tree
    if isinstance(tree, Mapping):
        return {key: converted(value, convert, (*path, key)) for key, value in tree.items()}
    return [converted(value, convert, (*path, number)) for number, value in enumerate(tree)]


def paired(own: Any, saved: Any, path: Path = ()) -> Iterator[tuple[Any, Any]]:
    """Yield each object of a tree (or `NamedModules`) with what was saved of it.

    Raises:
        CheckpointError: The saved tree has another form there.
    """
    if isinstance(own, NamedModules) or (has_state(own) and not isinstance(own, type)):
        yield own, saved
        return
    if next(objects_in(own), None) is None:
        return
    is_mapping = isinstance(own, Mapping)
    alike = isinstance(saved, Mapping if is_mapping else (list, tuple))
    keys = list(own) if is_mapping else list(range(len(own)))
    theirs = (list(saved) if is_mapping else list(range(len(saved)))) if alike else []
    if not alike or not set(keys) <= set(theirs) or (not is_mapping and len(keys) != len(theirs)):
        where = ".".join(map(str, path)) or "the state"
        raise CheckpointError(
            f"The checkpoint has a {type(saved).__name__} with {theirs or 'no entries'} at "
            f"{where!r}, expected entries for {keys}. Load with the objects that it was saved with."
        )
    for key in keys:
        yield from paired(own[key], saved[key], (*path, key))
