"""Keys and values that user code brings to an attention of which each rank has some heads.

    prefix (B, heads, P, width)      learned, in a tuple, a list, a cache of Hugging Face's ...
       └── cut ──> (B, heads / W, P, width)       while the attention runs on this rank
                      └── torch.cat([cut, own keys], dim=-2), as without ranks

What the attention has put there itself is of this rank's heads already, and stays as it is.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.units.unsharding import TracedHook
from lightning_shard.tensor_parallel.layers import is_split
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.regions import PASSES_ON, copy_to_region, split_to_region
from lightning_shard.tensor_parallel.wrappers import linear_sizes

_OWN = "_lightning_shard_own_heads"  # set on tensors that an attention has left where it runs
_HOLDS_KEYS = re.compile(r"past|cache|present|prefix|prompt|mem|kv|key|value", re.IGNORECASE)
_PLAIN = (str, bytes, int, float, type(None), nn.Module)
_DEPTH = 5  # argument, cache of two kinds, its list of layers, the layer, its keys
_Cut = tuple[Any, Any, Any, Any]  # container, key, what is there, what was there


@dataclass(eq=False)
class GivenHeads:
    """Cuts what one attention is given to this rank's heads, while it runs.

    Attributes:
        group: Group of the ranks that share the heads.
        widths: By full width of a projection, how many heads there are of which several ranks have
            one; 0 where each rank has heads of its own.
    """

    group: Collectives
    widths: Mapping[int, int]
    _running: list[list[_Cut]] = field(default_factory=list)

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call with this rank's heads."""
        cuts: list[_Cut] = []
        self._running.append(cuts)
        if torch.compiler.is_compiling() or not any(map(is_split, module.modules())):
            return None
        names = [*inspect.signature(module.forward).parameters]
        own = [self._own_of(name, one, cuts) for name, one in zip(names, args, strict=False)]
        return (*own, *args[len(own) :]), {
            name: self._own_of(name, kwargs[name], cuts) for name in kwargs
        }

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Note what is the attention's own, and put back what it has left as it was given."""
        if 1 in self.widths.values() and torch.is_grad_enabled():
            _visit((args, kwargs, result), _note_own, [])
        for container, key, cut, given in self._running.pop():
            there = dict(enumerate(container)) if isinstance(container, list) else container
            if there.get(key) is cut:  # else the attention has put something else there, or nothing
                container[key] = given

    def _own_of(self, name: str, value: Any, cuts: list[_Cut]) -> Any:
        return _visit(value, self._own, cuts) if _HOLDS_KEYS.search(name) else value

    def _own(self, tensor: Tensor) -> Tensor:
        """Return this rank's heads of (B, heads, P, width) or (B, P, heads, width)."""
        if tensor.ndim != 4 or hasattr(tensor, PASSES_ON) or _OWN in vars(tensor):
            return tensor
        for dim in (1, 2):
            num_heads, size = tensor.shape[dim], self.group.size
            shared = self.widths.get(num_heads * tensor.shape[3])
            if shared == 0 and num_heads % size == 0:
                return split_to_region(tensor, dim, self.group)
            if shared and shared == num_heads:
                first = self.group.rank * shared // size
                return copy_to_region(tensor, self.group).narrow(dim, first, 1)
        return tensor


def _note_own(tensor: Tensor) -> Tensor:
    vars(tensor)[_OWN] = True
    return tensor


def _visit(value: Any, see: Callable[[Tensor], Tensor], cuts: list[_Cut], depth: int = 0) -> Any:
    """Return a value with what `see` makes of each tensor; containers but tuples are changed."""
    if isinstance(value, Tensor):
        return see(value)
    if depth > _DEPTH or isinstance(value, (*_PLAIN, type)):
        return value
    if isinstance(value, tuple):
        made = [_visit(one, see, cuts, depth + 1) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    held = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", {})
    for key, one in [*(enumerate(held) if isinstance(held, list) else held.items())]:
        own = _visit(one, see, cuts, depth + 1)
        if own is not one and isinstance(own, (Tensor, tuple)):
            held[key] = own
            cuts.append((held, key, own, one))
    return value


def cut_given_heads(
    attention: nn.Module, layers: Sequence[PlannedLayer], group: Collectives
) -> Iterator[RemovableHandle]:
    """Let an attention be given keys and values of all heads; yield the hooks that see to it.

    Args:
        attention: A module that is told of this rank's heads.
        layers: Its layers that are split, before they are.
        group: Group of the ranks that share the heads.
    """
    widths = {}
    for module, style in ((layer.module, layer.style) for layer in layers):
        if style.form == "shared":
            widths[linear_sizes(module)[1]] = style.num_blocks
        elif style.form == "colwise":
            widths[linear_sizes(module)[1] // style.num_blocks] = 0
    given = GivenHeads(group, widths)
    if widths and group.size > 1:
        before, after = TracedHook(given.before), TracedHook(given.after)
        yield attention.register_forward_pre_hook(before, with_kwargs=True)
        yield attention.register_forward_hook(after, with_kwargs=True, always_call=True)
