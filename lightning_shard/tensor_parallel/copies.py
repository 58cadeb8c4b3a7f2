"""Copies of a split model that user code makes during the run, as a teacher in `on_train_start`.

Their parameters are shards, cut as the model's, and they compute in parts until the end of the run.
Each rank must make and keep the same copies.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.core.extensions import ModuleCopies
from lightning_shard.core.states import Asker, asker, having

_COPIES = "__deepcopy__"


class Copies:
    """The copies of a model's modules and of its split parameters."""

    def __init__(self) -> None:
        self.modules = ModuleCopies("tensor_parallel")
        self._params: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._copied: list[nn.Parameter] = []
        self._num_made = 0

    def copy_shards(self, params: Iterable[nn.Parameter]) -> None:
        """Let a copy of a parameter be a copy of its shard, also where it looks full."""
        for param in params:
            vars(param)[_COPIES] = _ShardCopier(self, param, vars(param).get(_COPIES))
            self._copied.append(param)

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

    def forget(self) -> None:
        """End the run: let modules and parameters be copied without notice."""
        for owner in (*self._copied, *self.params().values()):
            vars(owner).pop(_COPIES, None)
        self.modules.end()
        self._params = WeakTensorKeyDictionary()
        self._copied = []


class _ShardCopier:
    """Makes the copy of one parameter's shard for `copy.deepcopy`."""

    def __init__(
        self, copies: Copies, param: nn.Parameter, inner: Callable[[Any], Any] | None
    ) -> None:
        self._copies, self._param, self._inner = copies, weakref.ref(param), inner

    @having(asker, value=Asker.LAYER)
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
