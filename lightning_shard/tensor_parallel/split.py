"""Splitting a model in place by a plan, and restoring its full layers.

Copies of a split model that user code makes during the run, as a teacher in `on_train_start`.

Their parameters are shards, cut as the model's, and they compute in parts until the end of the run.
Each rank must make and keep the same copies.

Full activations for the hooks of modules that are called between split layers.

    up ──features──► act, dropout ──features──► down
                         │ gathered for their hooks, and cut again of what these return
                         └──► hook(module, args, output) of the full width

Such a module is known by when it is called: after a layer that gives features, and before the next
that takes them.
"""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import ModuleCopies
from lightning_shard.core.layout import PlacedBox
from lightning_shard.core.placeholders import Placeholder, is_placeholder
from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.differentiation import asking
from lightning_shard.data_parallel.gradients.reducer import others_wait_for
from lightning_shard.data_parallel.memory.quantised import is_quantised
from lightning_shard.data_parallel.model_split import ModelSplit, in_place
from lightning_shard.data_parallel.torch_private import (
    GLOBAL_HOOKS,
    gradient_hooks,
    hooks_of,
    pass_for_parameter,
    untraced,
)
from lightning_shard.data_parallel.units.unsharding import looks_at_values
from lightning_shard.data_parallel.views.sharded_parameter import bring_full
from lightning_shard.data_parallel.views.transforms import OF_RANKS, refuse_transforms
from lightning_shard.errors import ConfigError, LayoutError
from lightning_shard.tensor_parallel.candidates import check_heads
from lightning_shard.tensor_parallel.crossings import COMPUTED_ALIKE, Crossings
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DifferentiatedParts,
    DimShardedTensor,
    Part,
    from_local,
    full_tensor,
)
from lightning_shard.tensor_parallel.full_view import FullView, ViewsOfKeptParameters
from lightning_shard.tensor_parallel.heads import (
    ALL_HEADS,
    Attributes,
    count_heads,
    cut_given_heads,
)
from lightning_shard.tensor_parallel.layers import (
    LayerContext,
    attention_cuts,
    fast_paths,
    is_transposed,
    split_layer,
    unsplit_layer,
)
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.randomness import layers_around_dropout
from lightning_shard.tensor_parallel.regions import all_reduced
from lightning_shard.tensor_parallel.rounded import (
    are_between_blocks,
    cut_scales,
    is_packed,
    packed_sharding,
    shape_of,
)
from lightning_shard.tensor_parallel.sharding import Sharding
from lightning_shard.tensor_parallel.styles import ParameterCut, Style
from lightning_shard.tensor_parallel.wrappers import inner_styles

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


class SplitModel(ModelSplit):
    """A model whose layers are split over the ranks of a group.

    Args:
        model: The full model, the same on every rank.
        layers: The layers that the plan splits.
        group: Group of the tensor-parallel ranks, each of which must construct this.
        sequence_parallel: Whether activations outside the regions are in slices: see `sequence`.
        make: Gives a parameter on meta that gets a hook its values.

    Attributes:
        shardings: How each split parameter is cut.
        full_shapes: Full shape of each split parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[PlannedLayer],
        group: Collectives,
        *,
        sequence_parallel: bool = False,
        make: Callable[[nn.Parameter], object] | None = None,
    ) -> None:
        self.group = group
        self.groups = (group,)
        self.group_sets = ((), self.groups)  # of what is full, and of what is split
        self.is_first = group.rank == 0
        self._make = make
        self.shardings: dict[nn.Parameter, Sharding] = {}
        self.full_shapes: dict[nn.Parameter, torch.Size] = {}
        self._scales: dict[nn.Parameter, ParameterCut] = {}  # of packed weights
        self._layers = [inner for layer in layers for inner in _inside(layer)]
        self._shared = {one.module for one in self._layers if one.style.form.endswith("shared")}
        self._attributes = Attributes()
        self._hooks: list[RemovableHandle] = []
        self._is_in_step = False
        self._kept = ViewsOfKeptParameters(model)
        self._shown: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # parts and what shows them
        around_dropout = layers_around_dropout(model, layers)
        self._crossings = Crossings(group, around_dropout, sequence_parallel=sequence_parallel)
        for layer in self._layers:
            self._decide(layer)
        self._check_users(model)
        try:
            attentions = count_heads(model, layers, group.size, self._attributes)
        except ConfigError:
            self._attributes.restore()
            raise
        self._between = self._make_between(model)
        # Nothing is refused from here on, so that a refused model is left as it was.
        for attention, own in attentions.items():
            self._hooks += cut_given_heads(attention, own, group)
        for param, sharding in self.shardings.items():
            param.data = sharding.shard(param.data, group.rank)
        for layer in self._layers:
            self._split(layer, model.get_submodule(layer.parent))
        for module, name, value in fast_paths(model):
            self._attributes.set(module, name, value)
        self._copies = Copies()
        self._copies.modules.watch(
            [*(one.module for one in self._layers), *self._attributes.modules]
        )

    def copy_sharded(self) -> None:
        """Let copies of the model that are made from now on be split as the model is.

        Without it copies have full parameters where they look full, and have to be `unsplit`.
        """
        self._copies.copy_shards(self.shardings)

    def unsplit_copies(self) -> None:
        """Give the layers of copies their own forwards."""
        for made, original in self._copies.modules.take().items():
            unsplit_layer(made)
            self._attributes.restore_copy(made, original)

    def _decide(self, layer: PlannedLayer) -> None:
        """Decide how a layer's parameters are cut."""
        if isinstance(layer.module, LazyModuleMixin):
            raise ConfigError(
                f"{layer.name!r} is a {type(layer.module).__name__}, which becomes another class "
                f"in its first forward, also where it has values; expected that class before it is "
                f"split. Run one batch through the model before training."
            )
        if isinstance(layer.module, nn.MultiheadAttention):
            num_heads = layer.module.num_heads
            check_heads(layer.name, num_heads, num_heads, self.group.size)
        for cut in _cuts(layer.module, layer.style):
            param = layer.module.get_parameter(cut.name)
            if param in self.shardings:
                self._check_tied(layer, cut, param)
                continue
            if is_quantised(param) and not is_packed(param):
                raise ConfigError(
                    f"{layer.name}.{cut.name} is a quantised {type(param).__name__}, whose packed "
                    f"elements cannot be cut; expected floating-point weights. Leave the layer out "
                    f"of the plan, or use strategy='zero3'."
                )
            self.shardings[param] = self._sharding(layer, cut, param)
            self.full_shapes[param] = param.shape

    def _make_between(self, model: nn.Module) -> Between:
        planned = {one.module for one in self._layers if one.style.form != "replica"}
        names = {one: name for name, one in model.named_modules() if one not in planned}
        return Between(names, self.group)

    def _hears(self, parent: nn.Module, style: Style) -> Callable[[Any], None]:
        num_blocks = 1 if style.form.endswith("shared") else style.num_blocks
        return self._between.hears(parent, num_blocks, self._heads_of(parent))

    def _heads_of(self, parent: nn.Module) -> set[int]:
        """Return this rank's numbers of heads in a module, by which a dimension may be cut."""
        told = self._attributes.names_of(parent)
        heads = {getattr(parent, name) for name in told if name in ALL_HEADS}
        has_copies = not self._shared.isdisjoint(parent.children())
        return heads - {1} if has_copies else heads

    def _split(self, layer: PlannedLayer, parent: nn.Module) -> None:
        module, style = layer.module, layer.style
        enter, leave = self._crossings.of(layer)
        place = LayerContext(
            enter=enter,
            leave=leave,
            group=self.group,
            num_heads=style.num_blocks,
            alike=self._crossings.outside,
            view=self._view(module, layer.name),
            watched=self._crossings.watched(layer),
            scales=self._cut_scales(module),
            takes=None if style.full_input else self._between.close,
            gives=None if style.full_output else self._hears(parent, style),
        )
        if style.form == "replica" and self.group.size > 1:
            self._sum_gradients(module)
        split_layer(module, style.form, place)
        if style.form == "attention":
            output = module.get_submodule("out_proj")
            view = self._view(output, f"{layer.name}.out_proj")
            split_layer(output, "attention_output", replace(place, view=view))

    def _view(self, module: nn.Module, name: str) -> FullView:
        """Make the view of a layer's parameters that only its own forward sees in parts."""
        seen = {
            name: (self.shardings[param], self.full_shapes[param])
            for name, param in module._parameters.items()
            if param in self.shardings
        }
        return FullView(widen=self._look, names=seen, narrow=self._part, layer=name)

    def _look(self, how: tuple[Sharding, torch.Size], tensor: Tensor) -> Tensor:
        """Make a part of a weight look full while a step runs."""
        sharding, shape = how
        if not self._is_in_step or not bring_full(tensor):
            return tensor
        if tensor.shape != sharding.local_shape(shape):
            return tensor
        if is_placeholder(tensor):
            return Placeholder.of(tensor, shape, getattr(tensor, "origin", ""))
        return self._wide(sharding, tensor)

    @untraced
    def _wide(self, sharding: Sharding, part: Tensor) -> Tensor:
        """Return what shows a weight for as long as a step runs, in a graph or in none."""
        # A tied one is the same twice; what a step keeps by parameter it finds again.
        refuse_transforms(OF_RANKS)
        key = (id(part), part.requires_grad, part.dtype, torch.is_inference_mode_enabled())
        known, wide = self._shown.get(key, (None, part))
        if known is not part:
            dim, num_blocks = sharding.dim, len(sharding.blocks)
            with torch.enable_grad():
                wide = from_local(part, self.group, dim, num_blocks)
            pass_for_parameter(wide)
            self._shown[key] = part, wide
        return wide

    def _part(self, how: tuple[Sharding, torch.Size], tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor that looks full; others as they are."""
        sharding, shape = how
        if tensor.shape != shape or is_placeholder(tensor) or self.group.size == 1:
            return tensor
        if isinstance(tensor, DimShardedTensor):
            part = tensor.part
            if (part.dim, part.num_blocks) == (sharding.dim, len(sharding.blocks)):
                return part.local
        full = full_tensor(tensor)
        like = Part(local=full, dim=sharding.dim, group=self.group, num_blocks=len(sharding.blocks))
        return like.split(full, sharding.dim)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Show the full shapes of a layer's weights inside, to code outside of the layer."""
        show_full(self.shardings, self.group)
        self._between.look()
        before, self._is_in_step = self._is_in_step, True
        try:
            with self._kept.shown(), asking(DifferentiatedParts()):
                yield
        finally:
            self._is_in_step = before
            if not before:  # a backward by hand enters again
                self._shown.clear()
            self._crossings.forget()  # else what entered last is there until the next step
            self._between.close()

    def hook(self) -> AbstractContextManager[None]:
        """Show weights as they are inside, to hooks that a step calls, which see them full."""
        return setting(self, _is_in_step=False)

    def _sum_gradients(self, module: nn.Module) -> None:
        """Let a layer that works on each rank's heads have the gradient of all heads."""
        summed = partial(all_reduced, group=self.group)
        for param in module.parameters(recurse=False):
            if param.requires_grad:
                if self._make is not None:
                    self._make(param)
                self._hooks.append(param.register_hook(summed))  # type: ignore[no-untyped-call]
                put_first(param, self._hooks[-1])

    def _check_users(self, model: nn.Module) -> None:
        """Raise if a layer that the plan leaves full shares a weight that it cuts."""
        planned = {one for layer in self._layers for one in layer.module.modules()}
        for name, module in model.named_modules():
            for param in module._parameters.values():
                if param not in self.shardings or module in planned:
                    continue
                # a parent may list its layer's bias once more, as BERT's head does
                if param.ndim > 1 or planned.isdisjoint(module.modules()):
                    raise ConfigError(
                        f"The plan leaves {name!r} full, but cuts a weight that it shares with "
                        f"another layer; expected both in the plan. An embedding by rows goes with "
                        f"a head by columns."
                    )

    def _check_tied(self, layer: PlannedLayer, cut: ParameterCut, param: nn.Parameter) -> None:
        """Raise unless a layer that shares its weight with another cuts it in the same way."""
        known = self.shardings[param]
        if known.dim != cut.dim or len(known.blocks) != cut.num_blocks:
            raise ConfigError(
                f"{layer.name}.{cut.name} is tied to a weight that the plan cuts along dimension "
                f"{known.dim}, but is to be cut along dimension {cut.dim}; expected the same. An "
                "embedding by rows goes with a head by columns."
            )

    def _sharding(self, layer: PlannedLayer, cut: ParameterCut, param: Tensor) -> Sharding:
        name, num_blocks = f"{layer.name}.{cut.name}", cut.num_blocks
        if is_packed(param):
            return self._packed_sharding(name, cut, param)
        width = param.shape[cut.dim]
        if width % num_blocks:
            raise ConfigError(
                f"{name} has {width} elements along dimension {cut.dim}, expected a multiple of "
                f"{num_blocks}, the fused matrices that the plan says."
            )
        try:
            return Sharding(
                dim=cut.dim, blocks=(width // num_blocks,) * num_blocks, num_shards=self.group.size
            )
        except LayoutError as error:
            raise ConfigError(f"{name}: {error}") from error

    def _packed_sharding(self, name: str, cut: ParameterCut, param: Any) -> Sharding:
        if not are_between_blocks(param, cut, self.group.size):
            raise ConfigError(
                f"{name} of {tuple(shape_of(param))} is quantised with a scale for "
                f"{param.quant_state.blocksize} elements of a row each, and {self.group.size} "
                f"ranks would cut it within such a block; expected parts of whole blocks. Leave "
                f"the layer out of the plan, or use strategy='zero3'."
            )
        self._scales[param] = cut
        return packed_sharding(param, shape_of(param)[0], cut, self.group.size)

    def _cut_scales(self, module: nn.Module) -> Any:
        """Return the scales of this rank's part of a layer's weight; None for a plain one."""
        weight: Any = module._parameters.get("weight")
        if weight not in self._scales:
            return None
        return cut_scales(
            weight.quant_state, self._scales[weight], self.group.rank, self.group.size
        )

    def forget_activations(self) -> None:
        """Let go of the activation that entered last, and of the graph behind it."""
        self._crossings.forget()

    @property
    def parts(self) -> "SplitModel":
        """The split itself, whose ranks have parts of the same layers."""
        return self

    @property
    def copies(self) -> Sequence[nn.Parameter]:
        """The copies of split parameters that user code still has."""
        return list(self._copies.params().values())

    def is_spread(self, param: nn.Parameter) -> bool:
        """Whether a parameter is split."""
        return self.placement(param) is not None

    def placement(self, param: nn.Parameter) -> Sharding | None:
        """Return how a parameter is cut; None for one that is not."""
        return self.shardings.get(self._copies.original(param))

    def local(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of the full shape of `param`; others as is."""
        sharding = self.placement(param)
        if sharding is None or full.shape != self.full_shape(param):
            return full
        return sharding.shard(full, self.group.rank)

    def places(self, param: nn.Parameter, shape: Sequence[int]) -> Sequence[PlacedBox]:
        """Return where the blocks of this rank's shard of `param` lie in the full one."""
        sharding = self.placement(param)
        return [in_place(shape)] if sharding is None else sharding.places(shape, self.group.rank)

    @torch.no_grad()
    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a full tensor from shards that lie as `param`'s; each rank must call."""
        sharding = self.placement(param)
        if sharding is None:
            return local
        own = local.contiguous().view(-1)
        flat = own.new_empty(self.group.size * own.numel())
        self.group.all_gather(flat, own).wait()
        shards = flat.view(self.group.size, *local.shape).unbind()
        return sharding.assemble(shards)

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter, be it split, a copy of a split one, or neither."""
        return self.full_shapes.get(self._copies.original(param), param.shape)

    def _join_copies(self) -> None:
        """Make the copies full that all ranks still have."""
        copies = self._copies.params()
        everywhere = set.intersection(*self.group.all_gather_object(set(copies)))
        for number in sorted(everywhere):
            made = copies[number]
            sharding = self.placement(made)
            if sharding is not None and made.shape == sharding.local_shape(self.full_shape(made)):
                made.data = self.full(made, made.data)

    def restore(self, *, full: bool = True) -> None:
        """Give every layer its own class back; with `full`, for which all call, its parameters."""
        for param in self.shardings if full else ():
            param.data = self.full(param, param.data)
        if full:
            self._join_copies()
        self.unsplit_copies()
        self._copies.forget()
        for layer in self._layers:
            unsplit_layer(layer.module)
        self._attributes.restore()
        for hook in self._hooks:
            hook.remove()
        self._crossings.forget()
        self._between.end()
        show_as_they_are(self.shardings)
        self.shardings, self._layers = {}, []


def _inside(layer: PlannedLayer) -> Iterator[PlannedLayer]:
    """Yield a planned layer, or the layers that it wraps."""
    for path, style in inner_styles(layer.module, layer.style).items():
        name, module = f"{layer.name}.{path}".rstrip("."), layer.module.get_submodule(path)
        yield replace(layer, name=name, module=module, style=style)


def cuts_evenly(layer: PlannedLayer, num_ranks: int) -> bool:
    """Whether so many ranks can have equal parts of a layer's parameters."""
    return all(
        _cuts_evenly(one.module.get_parameter(cut.name), cut, num_ranks)
        for one in _inside(layer)
        for cut in _cuts(one.module, one.style)
    )


def _cuts_evenly(param: nn.Parameter, cut: ParameterCut, num_ranks: int) -> bool:
    if is_packed(param):
        return are_between_blocks(param, cut, num_ranks)
    return param.shape[cut.dim] % (cut.num_blocks * num_ranks) == 0


def _cuts(module: nn.Module, style: Style) -> tuple[ParameterCut, ...]:
    """Return how the parameters of a layer are cut."""
    if isinstance(module, nn.MultiheadAttention):
        return attention_cuts(module)
    if style.form in ("shared", "replica", "experts", *COMPUTED_ALIKE):
        return style.cuts
    if isinstance(module, nn.Embedding):
        return (ParameterCut(name="weight", dim=0 if style.form == "vocab" else 1),)
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    if style.form == "rowwise":
        return (ParameterCut(name="weight", dim=inputs),)
    weight = ParameterCut(name="weight", dim=outputs, num_blocks=style.num_blocks)
    bias = ParameterCut(name="bias", dim=0, num_blocks=style.num_blocks)
    return (weight,) if getattr(module, "bias", None) is None else (weight, bias)


@dataclass(frozen=True, kw_only=True)
class HookOnPart:
    """Calls a hook with a gradient that looks full, and takes this rank's part of its result."""

    hook: Any
    sharding: Sharding
    group: Collectives

    def __call__(self, grad: Tensor) -> Tensor | None:
        """Return the part of what the hook makes of the gradient, or None as the hook does."""
        dim, num_blocks = self.sharding.dim, len(self.sharding.blocks)
        part = Part(local=grad, dim=dim, group=self.group, num_blocks=num_blocks)
        changed = self.hook(part.wide_gradient(grad))
        return None if changed is None else part.own_gradient(changed)


@having(asker, value=Asker.ENGINE)
def show_full(shardings: dict[nn.Parameter, Sharding], group: Collectives) -> None:
    """Let the hooks that split parameters have by now see gradients that look full.

    Without it a hook that takes a norm would take that of this rank's part, on each rank another.
    """
    for param, sharding in shardings.items():
        if others_wait_for(param):
            raise ConfigError(
                f"Rank {group.rank}: a split parameter, of shape {tuple(param.shape)} here, has a "
                f"hook of register_post_accumulate_grad_hook, whose .grad would be this rank's "
                f"part. Use .grad in on_after_backward, change the gradient in a hook of "
                f"param.register_hook, or use strategy='zero2'."
            )
        hooks = gradient_hooks(param)
        for key, hook in hooks.items():
            if not isinstance(hook, HookOnPart):
                hooks[key] = HookOnPart(hook=hook, sharding=sharding, group=group)


def show_as_they_are(params: Iterable[nn.Parameter]) -> None:
    """Let the hooks of parameters, which are full again, see gradients as autograd has them."""
    for param in params:
        hooks = gradient_hooks(param)
        for key, hook in hooks.items():
            if isinstance(hook, HookOnPart):
                hooks[key] = hook.hook


def put_first(param: nn.Parameter, handle: RemovableHandle) -> None:
    """Call a hook before those that user code has put on the parameter."""
    hooks = cast("OrderedDict[int, Any]", gradient_hooks(param))
    hooks.move_to_end(handle.id, last=False)
