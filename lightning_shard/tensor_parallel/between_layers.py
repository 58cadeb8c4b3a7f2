"""Full activations for the hooks of modules that are called between split layers.

    up ──features──► act, dropout ──features──► down
                         │ gathered for their hooks, and cut again of what these return
                         └──► hook(module, args, output) of the full width

Such a module is known by when it is called: after a layer that gives features, and before the next
that takes them.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import GLOBAL_HOOKS, hooks_of, untraced
from lightning_shard.data_parallel.units.unsharding import looks_at_values
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part

_NOTE = "lightning_shard"  # the key of a hook that notes who will have gradients of features


@dataclass(frozen=True)
class _Cut:
    """A dimension of which this rank has a part."""

    size: int
    num_blocks: int = 1
    by_heads: bool = False


class Between:
    """Shows full activations to hooks of the modules between split layers."""

    def __init__(self, names: Mapping[nn.Module, str], group: Collectives) -> None:
        self._names, self._group = names, group
        self._hooks = [*map(hooks_of, names), GLOBAL_HOOKS]
        self._cuts: frozenset[_Cut] = frozenset()  # while features are computed with
        self._is_watched = False
        self._of_gradients: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def hears(
        self, parent: nn.Module, num_blocks: int, heads: Iterable[int]
    ) -> Callable[[Any], None]:
        """Return what hears that a layer gives features."""
        of_heads = {_Cut(size, by_heads=True) for size in heads}
        near = [*map(hooks_of, self._names.keys() & set(parent.modules())), GLOBAL_HOOKS]
        hooks = [one for several in near for one in several]

        @untraced
        def note(width: int) -> None:
            self._cuts |= {_Cut(width, num_blocks), _Cut(width // num_blocks), *of_heads}
            if any(hooks):  # some may be registered in a step
                self.look()

        def given(features: Any) -> None:
            if (self._is_watched or any(hooks)) and isinstance(features, Tensor):
                note(features.shape[-1])

        return given

    def close(self) -> None:
        """Hear that a layer takes features."""
        self._cuts = frozenset()

    def look(self) -> None:
        """Let the hooks that modules have by now see full activations."""
        self._is_watched = False
        for after, before, *of_gradients in self._hooks:
            if any(of_gradients):
                before.setdefault(_NOTE, _ShownHook(None, "noting"))  # type: ignore[call-overload]
            self._show(after, "after")
            self._show(before, "before")
            for hooks in of_gradients:
                self._show(hooks, "gradient")

    def _show(self, hooks: dict[int, Any], kind: str) -> None:
        for key, hook in hooks.items():
            if looks_at_values(hook) and not isinstance(hook, _ShownHook):
                hooks[key] = _ShownHook(hook, kind)
            if isinstance(hooks[key], _ShownHook):
                hooks[key].regions.add(self)
                self._is_watched = True

    def end(self) -> None:
        """Let hooks see what modules compute with, as they are full again."""
        for hooks in (hooks for one in self._hooks for hooks in one):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _ShownHook):
                    hook.regions.discard(self)
                    if hook.hook is None:
                        del hooks[key]
                    else:
                        hooks[key] = hook.hook

    def cuts_of(self, module: nn.Module, kind: str) -> Any:
        """Return how what hooks of a module may see is cut now, if it is."""
        if kind == "gradient":
            return self._of_gradients.get(module)
        return self._cuts if module in self._names else None

    def call(self, hook: Any, kind: str, module: nn.Module, given: Any, cuts: Any) -> Any:
        """Call a hook with full tensors, and return this rank's parts of what it makes of them."""
        if kind == "noting":
            self._of_gradients[module] = cuts
            return None
        find = partial(self._part, self._names[module], cuts)
        seen = tree_map_only(Tensor, lambda one: _full(find(one, 1)), given)
        result = hook(module, *seen)
        if result is None and kind != "gradient":  # what was given may be changed in place
            result = seen[-1] if kind == "after" else seen if len(seen) > 1 else seen[0]
        return tree_map_only(Tensor, lambda one: _own(find(one, self._group.size)), result)

    def _part(self, name: str, cuts: Any, tensor: Tensor, num_ranks: int) -> Part | Tensor:
        """Say how a tensor is cut, which so many ranks have together; itself for a full one."""
        is_full = isinstance(tensor, DimShardedTensor) or not tensor.is_floating_point()
        if is_full or tensor.ndim == 0:
            return tensor
        for cut in sorted(cuts, key=lambda one: not one.by_heads):
            is_counted = cut.by_heads and tensor.ndim > 3
            for dim in range(1, tensor.ndim - 1) if is_counted else (tensor.ndim - 1,):
                if tensor.shape[dim] == cut.size * num_ranks and is_counted == cut.by_heads:
                    return Part(local=tensor, dim=dim, group=self._group, num_blocks=cut.num_blocks)
        raise ConfigError(
            f"Rank {self._group.rank}: {name!r}, which is called between split layers, has a hook "
            f"that was to see a tensor of shape {tuple(tensor.shape)}, of which each rank may have "
            f"a part; expected features or heads in one of its dimensions. Remove the hook, or "
            f"leave the layers around the module out of `plan`."
        )


def _full(found: Part | Tensor) -> Tensor:
    return found.gather() if isinstance(found, Part) else found


def _own(found: Part | Tensor) -> Tensor:
    return found.split(found.local, found.dim) if isinstance(found, Part) else found


class _ShownHook:
    """A hook that sees full activations where its module is called between split layers."""

    def __init__(self, hook: Any, kind: str) -> None:
        self.hook, self._kind = hook, kind
        self.regions: WeakSet[Between] = WeakSet()

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        for one in self.regions:
            if cuts := one.cuts_of(module, self._kind):
                return one.call(self.hook, self._kind, module, given, cuts)
        return None if self.hook is None else self.hook(module, *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ShownHook":
        """Return the hook of a copied module, which is called where nothing is split."""
        return _ShownHook(copy.deepcopy(self.hook, memo), self._kind)
