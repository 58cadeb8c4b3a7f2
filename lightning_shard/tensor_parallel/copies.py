"""Copies of a split model that user code makes during the run, as a teacher in `on_train_start`.

Their parameters are shards, cut as the model's, and they compute in parts until the end of the run.
Copies are noticed by an attribute in each module, whose `__deepcopy__` is called when the copy of
the module exists already. Each rank must make and keep the same copies.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.core.states import having
from lightning_shard.tensor_parallel.full_view import sees_parts

_TELLS = "_tensor_parallel_copies"
_COPIES = "__deepcopy__"


class Copies:
    """The copies of a model's modules and of its split parameters."""

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        self._params: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._watched: list[nn.Module] = []
        self._copied: list[nn.Parameter] = []
        self._num_made = 0

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Note the copies of these modules from now on."""
        for module in dict.fromkeys(modules):
            vars(module)[_TELLS] = _Tells(self, module)
            self._watched.append(module)

    def copy_shards(self, params: Iterable[nn.Parameter]) -> None:
        """Let a copy of a parameter be a copy of its shard, also where it looks full."""
        for param in params:
            vars(param)[_COPIES] = _ShardCopier(self, param, vars(param).get(_COPIES))
            self._copied.append(param)

    def note_module(self, made: nn.Module, of: nn.Module) -> None:
        """Remember which module a module is a copy of."""
        self._modules[made] = self._modules.get(of, of)

    def note_param(self, made: nn.Parameter, of: nn.Parameter) -> None:
        """Remember which parameter a parameter is a copy of."""
        self._params[made] = self.original(of), self._num_made
        vars(made)[_COPIES] = _ShardCopier(self, made, None)
        self._num_made += 1

    def original(self, param: nn.Parameter) -> nn.Parameter:
        """Return the parameter that a parameter is a copy of, or itself."""
        found: nn.Parameter = self._params.get(param, (param, 0))[0]  # type: ignore[no-untyped-call]
        return found

    def params(self) -> dict[int, nn.Parameter]:
        """The copies of parameters that user code still has, by number."""
        items: Iterator[Any] = self._params.items()  # type: ignore[no-untyped-call]
        return {number: made for made, (_, number) in items}

    def take_modules(self) -> Mapping[nn.Module, nn.Module]:
        """Return the copies of modules with their originals, and forget them here."""
        taken = dict(self._modules.items())
        for made in taken:
            vars(made).pop(_TELLS, None)
        self._modules = weakref.WeakKeyDictionary()
        return taken

    def forget(self) -> None:
        """End the run: let modules and parameters be copied without notice."""
        for owner in (*self._copied, *self.params().values()):
            vars(owner).pop(_COPIES, None)
        for module in self._watched:
            vars(module).pop(_TELLS, None)
        self._params = WeakTensorKeyDictionary()
        self._copied, self._watched = [], []


class _Tells:
    """An attribute of a module whose `__deepcopy__` notes the module's copy."""

    def __init__(self, copies: Copies, module: nn.Module) -> None:
        self._copies, self._module = copies, weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tells":
        module = self._module()
        made = memo.get(id(module))
        if module is None or not isinstance(made, nn.Module):
            return self
        self._copies.note_module(made, module)
        return _Tells(self._copies, made)

    def __reduce__(self) -> Any:
        return type(None), ()


class _ShardCopier:
    """Makes the copy of one parameter's shard for `copy.deepcopy`."""

    def __init__(
        self, copies: Copies, param: nn.Parameter, inner: Callable[[Any], Any] | None
    ) -> None:
        self._copies, self._param, self._inner = copies, weakref.ref(param), inner

    @having(sees_parts, value=True)
    @torch.no_grad()
    def __call__(self, memo: dict[int, Any]) -> nn.Parameter:
        param = self._param()
        assert param is not None
        if self._inner is not None:
            made: nn.Parameter = self._inner(memo)
        else:
            copier: Any = type(param).__deepcopy__
            made = copier(param, memo)
        self._copies.note_param(made, param)
        return made

    def __reduce__(self) -> Any:
        return type(None), ()
