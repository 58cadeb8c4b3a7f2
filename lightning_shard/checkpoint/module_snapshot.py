"""A snapshot of a module before a load, so that a failed load leaves no trace.

A module's own hooks may do more than copy values: give buffers another size, set attributes,
rename entries. So a load is not foreseen but undone: the attributes of each submodule, the entries
of its dictionaries, lists and sets, and the tensors' values are remembered.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Of these a load may change the entries. Subclasses of a user's own may do anything when copied.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class ModuleSnapshot:
    """The attributes of a module and its submodules, and the values of their tensors.

    Args:
        module: The module to remember.
        with_parameters: Whether the parameters' values are kept, too, which takes their memory.
        without: Parameters that somebody else restores.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        with_parameters: bool = True,
        without: Container[nn.Parameter] = (),
    ) -> None:
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]
        self._entries = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in _CONTAINERS
        ]
        params = [one for one in module.parameters() if with_parameters and one not in without]
        self._values = [
            (tensor, tensor.data, tensor.detach().clone())
            for tensor in (*params, *module.buffers())
            if not is_lazy(tensor)
        ]

    def restore(self) -> None:
        """Undo a load, right after it: attributes, entries and values."""
        for part, attributes in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
        for container, entries in self._entries:
            _refill(container, entries)
        self.restore_values()

    @torch.no_grad()
    def restore_values(self) -> None:
        """Restore only the values of parameters and buffers, in whatever the module is now."""
        for tensor, data, value in self._values:
            if tensor.shape != value.shape:
                tensor.data = data
            tensor.copy_(value)


def _refill(container: Any, entries: Any) -> None:
    container.clear()
    container.extend(entries) if isinstance(container, list) else container.update(entries)


def named_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module itself, without those of its children."""
    yield from part.named_parameters(recurse=False, remove_duplicate=False)
    yield from part.named_buffers(recurse=False, remove_duplicate=False)
