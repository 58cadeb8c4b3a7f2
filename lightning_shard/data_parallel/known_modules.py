"""The modules inside another one, which are asked for in every step and hardly ever change.

`module.modules()` is generators inside of generators, one deep for every level of the model. So the
modules are walked through once, and again only after one was added, removed or replaced.
"""

from collections.abc import Sequence
from itertools import chain
from operator import is_

from torch import nn

from lightning_shard.data_parallel.torch_private import children_of


class KnownModules:
    """All modules of a module, itself included, each once.

    Args:
        root: The module whose modules are asked for.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._walk()

    def _walk(self) -> None:
        self._modules = tuple(self._root.modules())
        self._held = children_of(self._modules)
        self._children = self._children_now()

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._held))]

    def now(self) -> Sequence[nn.Module]:
        """Return the modules that there are now, in the order of `nn.Module.modules`."""
        children = self._children_now()
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._walk()
        return self._modules
