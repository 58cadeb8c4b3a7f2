"""What a selective checkpoint keeps of a block's forward, for its recomputation.

    forward          mm ──> kept    add    gelu    mm ──> kept
    recomputation    found          add    gelu    found             as often as a backward asks

Operations come in the same order both times: the results of each kind are found by counting.
torch's own modes keep results on the device, and for one backward: these keep them wherever they
are put, and for any number. In compiled code torch's partitioner goes by the same policy.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from lightning_shard.data_parallel.offload.activations import Saved
from lightning_shard.data_parallel.torch_private import TorchDispatchMode, versions_shared

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
}
_KEPT_WITHOUT_DROPOUT = {  # position of the probability: a skipped draw would shift later ones
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}


def policy(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Say whether the result of an operation is kept, as torch asks for in compiled code."""
    is_kept = _is_kept(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    place = _KEPT_WITHOUT_DROPOUT.get(operation)
    if place is None:
        return operation in _KEPT
    given = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    return not given


class KeptResults:
    """The results that one call of a block keeps.

    Args:
        keep: Keeps a tensor without a graph until the recomputation.
    """

    def __init__(self, keep: Callable[[Tensor], Saved]) -> None:
        self._keep = keep
        self._kept: dict[Any, list[Any]] = defaultdict(list)

    def keeping(self) -> TorchDispatchMode:
        """Make the mode of a forward, whose results are kept."""
        return _Mode(self._note)

    def finding(self) -> TorchDispatchMode:
        """Make the mode of one recomputation, which finds them.

        What it runs raises ConfigError where a result was changed in place.
        """
        return _Mode(_Finder(self._kept).find)

    def _note(self, operation: Any, compute: Callable[[], Any]) -> Any:
        result = compute()
        # what is kept must not become part of the graph, and sees changes of the result
        with versions_shared():
            kept = tree_map_only(Tensor, lambda one: _Kept(self._keep(one.detach())), result)
        self._kept[operation].append(kept)
        return result


class _Kept:
    """Holds what is kept of a tensor, as a leaf of a result's structure."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved


class _Finder:
    """Finds results in the order in which they were kept."""

    def __init__(self, kept: Mapping[Any, list[Any]]) -> None:
        self._kept = kept
        self._num_found: Counter[Any] = Counter()

    def find(self, operation: Any, compute: Callable[[], Any]) -> Any:
        """Return the next result of an operation; one that forward did not have is computed."""
        number = self._num_found[operation]
        self._num_found[operation] += 1
        results = self._kept.get(operation, [])
        if number >= len(results):
            return compute()
        return tree_map_only(_Kept, lambda one: one.saved.tensor(), results[number])


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands operations whose results are kept to a function."""

    def __init__(self, handle: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not _is_kept(func, args, named):
            return func(*args, **named)
        return self._handle(func, lambda: func(*args, **named))
