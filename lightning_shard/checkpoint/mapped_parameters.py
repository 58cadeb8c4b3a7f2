"""Parameters that show the elements of a mapped file, until ranks have cut them.

    built by the user      param ──> own memory
    lent                   param ──> mapped file    own memory waits: something may not fit
    the engine is made     param ──> shards         a rank reads what becomes its own
    given up               param ──> own memory     as it was

So a load copies no weights into a module that is full on the CPU. To the code in between
(`configure_optimizers`) the module holds what was loaded.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.torch_private import storage_uses, without_function_modes


class MappedParameters:
    """Lends a module's parameters what they would load, where that is all that loading does.

    A parameter whose memory something else sees too, or that is in another format or order than in
    the file, is left alone, to be loaded as ever.
    """

    def __init__(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        self._lent: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # own values, and the file's
        self.state = copy.copy(state)  # with what torch's own mapping knows of module versions
        left: Any = self.state
        for param, names in _names(module).items():
            value = _one_value(names, state)
            if value is not None and _can_show(param, value):
                self._lent[param] = param.data, value
                left.update(dict.fromkeys(names, param))  # to be loaded from itself

    @property
    def params(self) -> Collection[nn.Parameter]:
        """The parameters that are lent something, whose own values stay as they are."""
        return self._lent.keys()

    def lend(self) -> None:
        """Let the parameters show what is in the file."""
        for param, (_, value) in self._lent.items():
            param.data = value

    def give_back(self) -> None:
        """Let the parameters that still show the file have their own memory again, as it was."""
        for param, (own, _) in self._showing():
            param.data = own

    def take_over(self) -> None:
        """Give the parameters that still show the file memory of their own, with what it holds."""
        for param, _ in list(self._showing()):
            param.data = param.data.clone()
        self._lent.clear()

    def forget_own(self) -> None:
        """Let go of the values that the parameters had: all is known to fit."""
        self._lent = {param: (value, value) for param, (_, value) in self._lent.items()}

    def _showing(self) -> Iterator[tuple[nn.Parameter, tuple[Tensor, Tensor]]]:
        for param, (own, value) in self._lent.items():
            if param.data.data_ptr() == value.data_ptr():
                yield param, (own, value)


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter in the module's state."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names[value].append(name)
    return names


def _one_value(names: list[str], state: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor under these names, where it is the same; a tied weight may have others."""
    values = [state[name] for name in names if isinstance(state.get(name), Tensor)]
    places = {(value.data_ptr(), value.shape, value.stride()) for value in values}
    return values[0] if len(values) == len(names) and len(places) == 1 else None


def _can_show(param: nn.Parameter, value: Tensor) -> bool:
    """Whether a parameter that shows another tensor is as it would be after a load."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return False
    kinds = type(param) is nn.Parameter and type(value) is Tensor
    with without_function_modes():  # one of which has what is on meta said to be on the CPU
        places = param.is_cpu and value.is_cpu and param.layout is value.layout is torch.strided
    if not (kinds and places) or not value.numel():
        return False
    forms = (param.dtype, param.shape, param.stride()) == (value.dtype, value.shape, value.stride())
    return forms and storage_uses(param) == storage_uses(torch.empty(1))
