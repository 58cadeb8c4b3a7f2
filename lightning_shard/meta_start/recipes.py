"""How a parameter or buffer on meta gets its values: a note on a tape, left where it is found.

A parameter keeps the note as an attribute, which casts (`module.half()`) and the copies that ranks
of one process are given leave there; a cast buffer is another tensor, so its module keeps it, too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_shard.meta_start.tape import Ref, Tape

_ATTRIBUTE = "_lightning_shard_values"  # set on tensors and modules


@dataclass(frozen=True)
class Recipe:
    """A note of a tensor's values.

    Attributes:
        tape: The tape that it is on.
        ref: The tensor on it.
        tensor_id: The `id` of the tensor that the note was left at; a copy of it has another.
        version: The tensor's own count of changes then: later ones are on no tape.
    """

    tape: Tape
    ref: Ref
    tensor_id: int
    version: int

    def __deepcopy__(self, memo: object) -> "Recipe":
        """Return itself: copies of a module have the same values."""
        return self

    @property
    def is_written(self) -> bool:
        """Whether there are values."""
        return self.tape.is_written(self.ref)

    def misses_changes_of(self, tensor: Tensor) -> bool:
        """Whether the tensor was changed after its note was left."""
        return self.tensor_id == id(tensor) and self.version != tensor._version

    def fill(self, target: Tensor) -> None:
        """Write the values to a tensor of the same shape."""
        self.tape.fill(self.ref, target)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the values in new memory, in this format."""
        made = torch.empty(self.ref.size, dtype=dtype)
        self.fill(made)
        return made


def is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no elements."""
    return not is_lazy(tensor) and tensor.is_meta


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers without elements."""
    return any(map(is_on_meta, (*module.parameters(), *module.buffers())))


def note_recipes(modules: Iterable[nn.Module], tape: Tape) -> None:
    """Leave notes at the meta tensors of modules, and of their parts, that are on a tape."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    for part in parts:
        for param in part._parameters.values():
            if param is not None and is_on_meta(param):
                note_recipe(param, tape)
        for name, buffer in _own_buffers(part):
            note_recipe(buffer, tape)
            recipe = recipe_of(buffer)
            if recipe is not None:
                vars(part).setdefault(_ATTRIBUTE, {})[name] = recipe


def note_recipe(tensor: Tensor, tape: Tape) -> None:
    """Leave a note at a meta tensor that is on a tape."""
    ref = tape.ref(tensor)
    if ref is not None:
        vars(tensor)[_ATTRIBUTE] = Recipe(tape, ref, id(tensor), tensor._version)


def recipe_of(tensor: Tensor) -> Recipe | None:
    """Return the note at a tensor; None without one."""
    recipe: Recipe | None = vars(tensor).get(_ATTRIBUTE)
    return recipe


def buffer_recipe(module: nn.Module, name: str, buffer: Tensor) -> Recipe | None:
    """Return the note of a module's own buffer; None without one."""
    recipe: Recipe | None = vars(module).get(_ATTRIBUTE, {}).get(name)
    own = recipe_of(buffer)
    if own is not None or recipe is None or recipe.ref.size != tuple(buffer.shape):
        return own
    return recipe


def forget_recipes(module: nn.Module) -> None:
    """Remove all notes of a module that has its values."""
    for part in module.modules():
        vars(part).pop(_ATTRIBUTE, None)
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                vars(tensor).pop(_ATTRIBUTE, None)


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and is_on_meta(buffer):
            yield name, buffer
