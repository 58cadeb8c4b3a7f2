"""Splitting a model in place by a plan, and making it whole again."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError, LayoutError
from lightning_shard.tensor_parallel.layers import (
    Crossing,
    Place,
    is_transposed,
    split_layer,
    unsplit_layer,
)
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.regions import (
    copy_to_region,
    gather_copies,
    gather_to_region,
    reduce_from_region,
    reduce_scatter_from_region,
    split_to_region,
)
from lightning_shard.tensor_parallel.sharding import Sharding
from lightning_shard.tensor_parallel.styles import Style

# Attributes by which attention modules, and GPT-2's Conv1D, know how wide their projections are:
# on each rank they are as many times smaller as there are ranks.
_WIDTHS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads"),
    *("num_key_value_heads", "num_kv_heads", "all_head_size", "split_size", "inner_dim"),
)


class SplitModel:
    """A model whose layers are split over the ranks of a group.

    Args:
        model: Whole, and the same on every rank.
        layers: The plan's layers.
        group: The tensor-parallel group; each of its ranks must construct this.

    Attributes:
        shardings: How each split parameter is cut.
        full_shapes: Its shape as a whole.

    Raises:
        ConfigError: A layer cannot be split over so many ranks.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[PlannedLayer], group: Collectives
    ) -> None:
        self.group = group
        self.shardings: dict[nn.Parameter, Sharding] = {}
        self.full_shapes: dict[nn.Parameter, torch.Size] = {}
        self._layers = list(layers)
        self._changed: list[tuple[nn.Module, str, Any]] = []
        self._entrance = _Entrance(group)
        parents = {
            f"{path}.{name}".lstrip("."): parent
            for path, parent in model.named_modules()
            for name, _ in parent.named_children()
        }
        for layer in layers:
            self._split(layer)
        for parent in {id(parents[one.name]): parents[one.name] for one in layers}.values():
            self._narrow(parent, _WIDTHS)

    def _split(self, layer: PlannedLayer) -> None:
        module, style = layer.module, layer.style
        if is_transposed(module) and style.form == "colwise":
            self._narrow(module, ("nf",))
        for name, dim in _cut_dims(module, style).items():
            param = getattr(module, name)
            if param is None:
                continue
            if param in self.shardings:
                self._check_tied(layer, name, param, dim)
                continue
            sharding = self._sharding(layer, name, param, dim)
            self.full_shapes[param] = param.shape
            param.data = sharding.shard(param.data, self.group.rank)
            self.shardings[param] = sharding
        place = Place(
            rank=self.group.rank,
            enter=self._enter(module, style),
            leave=self._leave(style),
        )
        split_layer(module, style.form, place)

    def _check_tied(self, layer: PlannedLayer, name: str, param: nn.Parameter, dim: int) -> None:
        """Raise unless a layer that shares its weight with another cuts it in the same way."""
        known = self.shardings[param]
        if known.dim != dim or len(known.blocks) != layer.style.num_blocks:
            raise ConfigError(
                f"{layer.name}.{name} is tied to a weight that the plan cuts along dimension "
                f"{known.dim}, but is to be cut along dimension {dim}; expected the same. An "
                "embedding by rows goes with a head by columns."
            )

    def _sharding(self, layer: PlannedLayer, name: str, param: Tensor, dim: int) -> Sharding:
        num_blocks, width = layer.style.num_blocks, param.shape[dim]
        if width % num_blocks:
            raise ConfigError(
                f"{layer.name}.{name} has {width} elements along dimension {dim}, expected a "
                f"multiple of {num_blocks}, the fused matrices that the plan says."
            )
        try:
            return Sharding(
                dim=dim, blocks=(width // num_blocks,) * num_blocks, num_shards=self.group.size
            )
        except LayoutError as error:
            raise ConfigError(f"{layer.name}.{name}: {error}") from error

    def _enter(self, module: nn.Module, style: Style) -> Crossing:
        if isinstance(module, nn.Embedding):
            return _unchanged  # indices
        if style.form == "colwise":
            return self._entrance if style.whole_input else self._crossing(gather_to_region, -1)
        return self._crossing(split_to_region, -1) if style.whole_input else _unchanged

    def _leave(self, style: Style) -> Crossing:
        if style.form == "colwise":
            return self._crossing(gather_copies, -1) if style.whole_output else _unchanged
        if style.whole_output:
            return self._crossing(reduce_from_region)
        return self._crossing(reduce_scatter_from_region, -1)

    def _crossing(self, function: Callable[..., Tensor], *dim: int) -> Crossing:
        return lambda tensor: function(tensor, *dim, self.group)

    def _narrow(self, module: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            width = module.__dict__.get(name)
            if not isinstance(width, int) or isinstance(width, bool):
                continue
            if width % self.group.size:
                fitting = [str(n) for n in range(1, width + 1) if width % n == 0]
                raise ConfigError(
                    f"{type(module).__name__}.{name} is {width}, which {self.group.size} ranks "
                    f"cannot share; expected a tensor_parallel_size of {', '.join(fitting)}."
                )
            self._changed.append((module, name, width))
            setattr(module, name, width // self.group.size)

    @property
    def is_first(self) -> bool:
        """Whether this is the group's rank 0."""
        return self.group.rank == 0

    def group_of(self, param: nn.Parameter) -> Collectives | None:
        """Return the group that a parameter is split over, or None."""
        return self.group if param in self.shardings else None

    def local(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor shaped as the whole of `param`; others as is."""
        sharding = self.shardings.get(param)
        if sharding is None or whole.shape != self.full_shapes[param]:
            return whole
        return sharding.shard(whole, self.group.rank)

    @torch.no_grad()
    def whole(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a whole tensor from shards that lie as `param`'s; each rank must call."""
        if param not in self.shardings:
            return local
        own = local.contiguous().view(-1)
        flat = own.new_empty(self.group.size * own.numel())
        self.group.all_gather(flat, own).wait()
        shards = flat.view(self.group.size, *local.shape).unbind()
        return self.shardings[param].assemble(shards)

    def restore(self, *, whole: bool = True) -> None:
        """Give every layer its own class back, and with `whole` its whole parameters.

        Args:
            whole: Collective: each rank must call. Without it the shards stay.
        """
        for param in self.shardings if whole else ():
            param.data = self.whole(param, param.data)
        for layer in self._layers:
            unsplit_layer(layer.module)
        for module, name, value in self._changed:
            setattr(module, name, value)
        self.shardings, self._layers, self._changed = {}, [], []


class _Entrance:
    """Enters a region once for all layers that are given the same activation.

    Query, key and value all take one activation: their gradients are then added up on this rank,
    and summed over the ranks once instead of three times.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self._last: weakref.ref[Tensor] | None = None
        self._entered: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        entered = self._entered
        is_known = self._last is not None and self._last() is tensor
        if entered is None or not is_known or entered.requires_grad != self._follows(tensor):
            entered = copy_to_region(tensor, self._group)
            self._last = None  # what it stood for may end with the next line
            self._entered, self._last = entered, weakref.ref(tensor, self._forget)
        return entered

    def _follows(self, tensor: Tensor) -> bool:
        """Whether the entered form of an activation requires a gradient now."""
        return tensor.requires_grad and torch.is_grad_enabled()

    def _forget(self, reference: "weakref.ref[Tensor]") -> None:
        if reference is self._last:
            self._last = self._entered = None


def _cut_dims(module: nn.Module, style: Style) -> dict[str, int]:
    """Which parameters of a layer are cut, and along which dimension."""
    if style.form == "vocab":
        return {"weight": 0}
    if isinstance(module, nn.Embedding):
        return {"weight": 1}
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    return {"weight": outputs, "bias": 0} if style.form == "colwise" else {"weight": inputs}


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
