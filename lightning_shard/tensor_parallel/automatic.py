"""A plan for a model without one: layers that can be split are found and tried out.

    1. torch's MultiheadAttention             by heads
    2. a Hugging Face model's own plan        as that plan says
    3. attentions, then pairs of layers       found in `candidates`, tried out in `probe`
    4. the largest embedding, and those that are tied to it, or as many rows as an output layer
       gives logits, together with that layer      by vocabulary

Whatever is not split computes on each rank as it did. An embedding whose weight a module multiplies
with by itself, with no layer between, has to be left out by a plan of one's own.

A Hugging Face model's `tp_plan` is read into this package's styles, without `transformers`:

    layers.*.self_attn.k_proj           colwise         with fewer key heads than ranks: shared
    layers.*.mlp.experts.gate_up_proj   packed_colwise  ─┐
    layers.*.mlp.experts.down_proj      rowwise          ├─> one style of the module `experts`
    layers.*.mlp.experts                moe_tp_experts  ─┘

Source: `transformers.distributed.tensor_parallel`, checked with transformers 5.23.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.core.modules import largest_layers
from lightning_shard.data_parallel.memory.inner_tensors import composed_names, is_taken_apart
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.candidates import (
    Candidate,
    check_heads,
    find_attention,
    find_full_width_attention,
    find_pairs,
    key_style,
    makes_head_biases,
)
from lightning_shard.tensor_parallel.layers import has_weight, is_plain_attention, is_plain_linear
from lightning_shard.tensor_parallel.plan import (
    PlannedLayer,
    gives_features,
    match_plan,
    matcher_of,
    pattern_of,
)
from lightning_shard.tensor_parallel.probe import (
    TrialResult,
    try_out,
    try_table,
    with_tried_wrappers,
)
from lightning_shard.tensor_parallel.split import cuts_evenly
from lightning_shard.tensor_parallel.styles import STYLES, ParameterCut, Style, style_name, style_of
from lightning_shard.tensor_parallel.wrappers import is_low_rank, linear_sizes

_LEFT_FULL = ("replicate", "sequence_parallel")
_NOT_SUPPORTED = (
    "all_reduce",
    "local_params",
    "moe_identity_expert",
    "packed_rowwise",
    "grouped_gemm",
    "ep_dispatch_experts",
)
_WITH_COUNT = {"packed_colwise": "packed_colwise(2)"}
_QUERY, _KEYS = ("q_proj", "query"), ("k_proj", "v_proj", "key", "value")


def automatic_plan(model: nn.Module, num_ranks: int) -> list[PlannedLayer]:
    """Find what can be split over the ranks of a tensor-parallel group.

    The model is full and stays as it is. The plan is the same on each rank, and depends on the
    values only in whether parameters are tied.

    Raises:
        ConfigError: The ranks cannot share the heads of an attention, or nothing can be split.
    """
    finder = _LayerFinder(model, num_ranks)
    finder.find()
    if (composed := [*composed_names(model)]) and num_ranks > 1:
        rank_zero_warn(
            f"{composed[0]!r} and {len(composed) - 1} more weights are made of several tensors; "
            f"their layers stay full on each of the {num_ranks} tensor-parallel ranks."
        )
    if not finder.planned and num_ranks > 1:
        raise ConfigError(
            f"Use strategy='zero3', which shards layers of every kind: found nothing in "
            f"{type(model).__name__} to split over {num_ranks} ranks. {largest_layers(model)} "
            f"Expected attentions, pairs of linear layers to a larger width and back, or an "
            f"embedding of a vocabulary.{finder.trials()}{_own_plan(model, num_ranks)}"
        )
    return list(finder.split())


def _own_plan(model: nn.Module, num_ranks: int) -> str:
    """Say how a plan of the user's own could split linear layers of this model, if it can."""
    linear = {name: one for name, one in model.named_modules() if name and is_plain_linear(one)}
    wide = [name for name in linear if linear_sizes(linear[name])[1] % num_ranks == 0]
    if not wide:
        return ""
    last = max(wide, key=lambda name: linear[name].get_parameter("weight").numel())
    return f" A plan of your own could be plan={{{last!r}: 'colwise_gather_output'}}."


class _LayerFinder:
    """Goes through a model, and notes which layers are split, and which others stay full."""

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        self.model, self.num_ranks = model, num_ranks
        self.names = {module: name for name, module in model.named_modules()}
        self.planned: dict[nn.Module, PlannedLayer] = {}
        self._full: set[nn.Module] = set()  # as far as that is decided
        self._of_attentions: set[nn.Module] = set()  # which are split with these
        self._users = Counter(
            id(param) for module in self.names for param in module._parameters.values()
        )
        self._holders = Counter(
            id(child) for module in self.names for child in module._modules.values()
        )
        self._tried: dict[tuple[object, ...], TrialResult] = {}
        self._tables: dict[
            type[nn.Module], set[int] | None
        ] = {}  # widths of those outside of a class
        self._inside_planned: set[nn.Module] = set()
        self._untried: list[Candidate] = []
        self._failed: list[tuple[Candidate, TrialResult]] = []

    def find(self) -> None:
        """Find the layers of the four kinds, in the order of the module's docstring."""
        for module, name in self.names.items():
            if isinstance(module, nn.MultiheadAttention):
                self._plan_torch_attention(name, module)
        for layer in with_tried_wrappers(own_plans(self.model, self.num_ranks), self.num_ranks):
            if not self._is_full(layer.module):
                self.planned.setdefault(layer.module, layer)
        inner_first = sorted(self.names, key=lambda module: -len(self.names[module].split(".")))
        inner_first = [*(one for one in inner_first if one is not self.model), self.model]
        for find in (find_attention, find_full_width_attention, find_pairs):
            for owner in inner_first:
                for candidate in find(owner, self.num_ranks, self._is_free):
                    if not (candidate.counts_heads and self._is_given_biases(candidate)):
                        self._consider(candidate)
        for candidate in self._untried:
            self._believe(candidate)
        self._plan_vocabulary()

    def split(self) -> Iterator[PlannedLayer]:
        """Yield the layers to split; under a pattern, where all its matches are split alike."""
        styles: dict[str, set[Style | None]] = {}
        for module, name in self.names.items():
            style = self.planned[module].style if module in self.planned else None
            styles.setdefault(pattern_of(name), set()).add(style)
        for module, name in self.names.items():
            if layer := self.planned.get(module):
                pattern = pattern_of(name)
                yield replace(layer, pattern=pattern if len(styles[pattern]) == 1 else name)

    def trials(self) -> str:
        """Say of which layers a trial has raised an error of the model's own code."""
        for candidate, tried in self._failed:
            names = " and ".join(repr(self.names[one]) for one in _layers(candidate).values())
            return f" A trial of {names} raised {tried.cause}."
        return ""

    def _plan_torch_attention(self, name: str, module: nn.MultiheadAttention) -> None:
        self._of_attentions.add(module.out_proj)  # it is split with its owner
        if not is_plain_attention(module):
            self._full.add(module)
            return
        check_heads(name, module.num_heads, module.num_heads, self.num_ranks)
        self._plan(module, STYLES["attention"])

    def _plan(self, module: nn.Module, style: Style, *, has_heads: bool = False) -> None:
        name = self.names[module]
        self.planned[module] = PlannedLayer(
            name=name, module=module, style=style, pattern=name, has_heads=has_heads
        )

    def _is_free(self, module: nn.Module) -> bool:
        """Whether a linear layer is in no plan or candidate yet, and shared with nothing."""
        return (
            (is_plain_linear(module) or is_low_rank(module))
            and module not in self.planned
            and module not in self._of_attentions
            and self._holders[id(module)] == 1
            and all(self._users[id(param)] == 1 for param in module.parameters())
        )

    def _consider(self, candidate: Candidate) -> None:
        """Plan a candidate's layers if a trial shows that they may be split."""
        layers = _layers(candidate)
        if any(layer in self.planned for layer in layers.values()):
            return
        key = candidate.signature
        if key not in self._tried:
            self._tried[key] = try_out(candidate, self.num_ranks)
            if self._tried[key].cause:
                self._failed.append((candidate, self._tried[key]))
        tried = self._tried[key]
        if tried.is_right:
            self._plan_layers(candidate)
            for name in tried.inner:
                inner = candidate.owner.get_submodule(name)
                self._plan(inner, STYLES["replicated_with_grad_allreduce"])
        elif tried.is_right is None:
            self._untried.append(candidate)
        else:
            self._full.update(layers.values())

    def _plan_layers(self, candidate: Candidate) -> None:
        for name, module in _layers(candidate).items():
            has_heads = candidate.counts_heads and name != candidate.out
            self._plan(module, candidate.styles[name], has_heads=has_heads)

    def _is_given_biases(self, candidate: Candidate) -> bool:
        """Whether an attention may be called with a bias of each head that another module makes."""
        # Such a bias is of all heads, so the attention must not be told of fewer heads, unless one
        # of its class makes the bias itself, for its own heads.
        owner = candidate.owner
        if type(owner) not in self._tables:
            self._tables[type(owner)] = self._tables_beside(type(owner))
        widths = self._tables[type(owner)]
        if widths is None:
            return False
        is_made = candidate.num_heads in widths
        return is_made or any("bias" in one for one in inspect.signature(owner.forward).parameters)

    def _tables_beside(self, kind: type[nn.Module]) -> set[int] | None:
        """Return the widths of tables outside of a class; None if it makes biases itself."""
        alike = [one for one in self.names if type(one) is kind]
        if any(map(makes_head_biases, alike)):
            return None
        inside = {param for one in alike for param in one.parameters()}
        tables = (param for param in self.model.parameters() if param.ndim == 2)
        return {param.shape[1] for param in tables if param not in inside}

    def _believe(self, candidate: Candidate) -> None:
        """Plan a pair that could not be tried out by its names; an attention's say too little."""
        layers = _layers(candidate)
        if any(layer in self.planned or self._is_full(layer) for layer in layers.values()):
            return
        if candidate.is_known and candidate.is_all and not candidate.is_attention:
            self._plan_layers(candidate)
        else:
            self._full.update(layers.values())

    def _plan_vocabulary(self) -> None:
        """Split the largest embedding by rows, others like it, and their output layers."""
        self._inside_planned = {one for planned in self.planned for one in planned.modules()}
        tables = [
            module
            for module in self.names
            if isinstance(module, nn.Embedding)
            and has_weight(module)
            and module not in self._inside_planned
        ]
        heads = [one for one in self.names if self._is_head(one)]
        largest = max((table.weight.numel() for table in tables), default=0)
        for table in tables:
            own_heads = [one for one in heads if one.weight.shape == table.weight.shape]
            if table.weight.numel() < largest and not own_heads:
                continue
            if not self._can_be_split(table):
                self._full.update(own_heads)
                continue
            self._plan(table, STYLES["embedding_rowwise"])
            for head in own_heads:
                self._plan(head, STYLES["colwise_gather_output"])
        self._leave_logits_sharded()

    def _leave_logits_sharded(self) -> None:
        """Leave the logits of layers with a logit for each row of an embedding sharded."""
        rows = {
            one.weight.shape
            for one, layer in self.planned.items()
            if isinstance(one, nn.Embedding) and layer.style.form == "vocab"
        }
        for module, layer in self.planned.items():
            gathers = layer.style == STYLES["colwise_gather_output"]
            if gathers and isinstance(module, nn.Linear) and module.weight.shape in rows:
                self.planned[module] = replace(layer, style=STYLES["colwise_parted"])

    def _is_head(self, module: nn.Module) -> bool:
        """Whether a layer may give logits: it takes and gives full activations."""
        return (
            isinstance(module, nn.Linear)
            and is_plain_linear(module)
            and module not in self._inside_planned
            and not self._is_full(module)
        )

    def _is_full(self, module: nn.Module) -> bool:
        return module in self._full or module in self._of_attentions

    def _can_be_split(self, table: nn.Embedding) -> bool:
        """Whether ranks can share the rows of an embedding, with all that has its weight."""
        sharing = [one for one in self.names if one._parameters.get("weight") is table.weight]
        embeddings = [one for one in sharing if isinstance(one, nn.Embedding)]
        return (
            table.num_embeddings % self.num_ranks == 0
            and all(isinstance(one, nn.Embedding) or self._is_tied_head(one) for one in sharing)
            and all(one.max_norm is None and not one.scale_grad_by_freq for one in embeddings)
            and all(
                try_table(one, self.num_ranks).is_right
                for one in embeddings
                if type(one).forward is not nn.Embedding.forward
            )
        )

    def _is_tied_head(self, module: nn.Module) -> bool:
        planned = self.planned.get(module)
        return self._is_head(module) or (planned is not None and planned.style.form == "colwise")


def _layers(candidate: Candidate) -> dict[str, nn.Module]:
    return {name: candidate.owner.get_submodule(name) for name in candidate.styles}


def check_layouts(model: nn.Module, layers: Sequence[PlannedLayer], num_ranks: int) -> None:
    """Compare the fused layers of a given plan with a plan that was tried out.

        [ q | k | v ]               packed_colwise(3)      qkv.chunk(3), view(B, T, 3, heads, width)
        [ q0 k0 v0 | q1 k1 v1 ]     colwise                view(B, T, heads, 3, width)

    Cut in the other way, every rank gets activations of the right shape: a model trains, but it is
    another model.

    Raises:
        ConfigError: A trial finds that a layer is laid out otherwise.
    """
    fused = {layer.module: layer for layer in _fused(layers)}
    if not fused or num_ranks == 1:
        return
    try:
        tried = automatic_plan(model, num_ranks)
    except ConfigError:  # of what the given plan leaves full, or cuts by itself
        return
    for right in tried:
        given = fused.get(right.module)
        is_fused = right.style.form == "colwise" and not right.style.full_output
        if given and is_fused and given.style.num_blocks != right.style.num_blocks:
            raise ConfigError(
                f"The plan's entry {given.pattern!r} cuts {given.name!r} "
                f"{style_name(given.style)}, but its parts lie in it otherwise: a trial computed "
                f"the same with {style_name(right.style)!r}, expected that."
            )


def _fused(layers: Sequence[PlannedLayer]) -> Iterator[PlannedLayer]:
    """Yield the layers whose output is wider than any input of their module's layers."""
    taken: dict[str, set[int]] = {}
    for layer in layers:
        if layer.style.form == "rowwise":
            taken.setdefault(layer.parent, set()).add(linear_sizes(layer.module)[0])
    for layer in layers:
        feeds = layer.style.form == "colwise" and not layer.style.full_output
        if feeds and not isinstance(layer.module, nn.Embedding):
            outputs = linear_sizes(layer.module)[1]
            if layer.style.num_blocks > 1 or outputs not in taken.get(layer.parent, {outputs}):
                yield layer


def own_plans(model: nn.Module, num_ranks: int) -> Iterator[PlannedLayer]:
    """Yield the layers that the plans of the Hugging Face models in a model name."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None) if hasattr(type(module), "tp_plan") else None
        if not isinstance(plan, dict) or not plan or (name + ".").startswith(inside or ("\n",)):
            continue
        prefix = f"{name}." if name else ""
        inside = (*inside, prefix)
        named = match_plan(module, _own_styles(module, plan), is_own=True)
        for layer in _that_divide(list(_with_heads(module, named, num_ranks)), num_ranks):
            yield replace(layer, name=prefix + layer.name, pattern=prefix + layer.pattern)


def _own_styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Read a plan's entries; entries that match no module of this model are left out."""
    modules = [name for name, _ in model.named_modules()]
    styles: dict[str, Style] = {}
    for pattern, name in plan.items():
        if name in _NOT_SUPPORTED:
            raise _not_supported(model, pattern, name)
        matching = next(filter(matcher_of(pattern).fullmatch, modules), None)
        if name in _LEFT_FULL or matching is None:
            continue
        if name == "mla_kv_a_proj":
            if (style := _shared_tail(model, matching)) is None:
                raise _not_supported(model, pattern, name)
            styles[pattern] = style
        elif name == "moe_tp_experts":
            styles[pattern] = _experts(pattern, model.get_submodule(matching), plan)
        else:
            styles[pattern] = style_of(_WITH_COUNT.get(name, name), pattern)
    return styles


def _not_supported(model: nn.Module, pattern: str, style: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__}'s own plan splits {pattern!r} by {style!r}, which is not "
        "supported. Give the strategy a plan that leaves this layer full, with all that it feeds."
    )


def _shared_tail(model: nn.Module, name: str) -> Style | None:
    """Return the style of a latent attention's projection, whose rotary features all heads use."""
    attention = model.get_submodule(name.rpartition(".")[0])
    num_features = getattr(attention, "qk_rope_head_dim", None)
    return None if num_features is None else style_of(f"shared_tail({num_features})", name)


def _experts(pattern: str, module: nn.Module, plan: Mapping[str, str]) -> Style:
    """Collect the plan's entries for the parameters of experts into one style."""
    cuts: list[ParameterCut] = []
    for name, param in module.named_parameters(recurse=False):
        style = plan.get(f"{pattern}.{name}", "none")
        if param.ndim != 3 or getattr(module, "is_transposed", False):
            style = "none"
        if style == "rowwise":
            cuts.append(ParameterCut(name=name, dim=2))
        elif style in ("colwise", "packed_colwise"):
            cuts.append(ParameterCut(name=name, dim=1, num_blocks=2 if style[0] == "p" else 1))
        else:
            raise ConfigError(
                f"The experts {pattern!r} have a parameter {name!r} of shape "
                f"{tuple(param.shape)}, expected matrices of shape (experts, outputs, inputs) that "
                "the model's own plan splits. Give the strategy a plan without them."
            )
    return Style(form="experts", cuts=tuple(cuts))


def _that_divide(layers: list[PlannedLayer], num_ranks: int) -> Iterator[PlannedLayer]:
    """Yield the layers of which ranks have equal parts; others are full, with all beside them."""
    # A region begins and ends in one module. A head whose weight is an embedding's stays with it.
    full = [
        layer
        for layer in layers
        if is_taken_apart(layer.module) or not cuts_evenly(layer, num_ranks)
    ]
    owners = {layer.parent for layer in full}
    weights = {param for layer in full for param in layer.module.parameters()}
    for layer in layers:
        is_beside = layer.parent in owners
        if not is_beside and weights.isdisjoint(layer.module.parameters()):
            yield layer


def _with_heads(
    model: nn.Module, layers: list[PlannedLayer], num_ranks: int
) -> Iterator[PlannedLayer]:
    """Share the heads of keys and values where they are fewer than the ranks."""
    heads: dict[str, int] = {}
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        head_dim = model.get_submodule(parent).__dict__.get("head_dim")
        is_split = layer.style.form == "colwise" and not layer.style.full_output
        if not is_split or not isinstance(head_dim, int) or not gives_features(layer.module):
            yield layer
            continue
        num_heads = linear_sizes(layer.module)[1] // head_dim
        if name in _QUERY:
            heads[parent] = num_heads
        if name in _KEYS:
            kind = type(model.get_submodule(parent)).__name__
            check_heads(f"{parent} ({kind})", heads.get(parent, num_heads), num_heads, num_ranks)
            layer = replace(layer, style=key_style(num_heads, num_ranks))
        yield layer
