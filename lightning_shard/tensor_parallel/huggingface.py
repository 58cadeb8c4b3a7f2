"""The plan of a Hugging Face model, `model.tp_plan`, read into this package's styles.

    layers.*.self_attn.k_proj           colwise         with fewer key heads than ranks: shared
    layers.*.mlp.experts.gate_up_proj   packed_colwise  ─┐
    layers.*.mlp.experts.down_proj      rowwise          ├─> one style of the module `experts`
    layers.*.mlp.experts                moe_tp_experts  ─┘

Nothing here imports `transformers`: a model is one that has a `tp_plan`.

Source: `transformers.distributed.tensor_parallel`, checked with transformers 5.23.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.candidates import check_heads, key_style
from lightning_shard.tensor_parallel.plan import PlannedLayer, match_plan, matcher_of
from lightning_shard.tensor_parallel.split import cuts_evenly
from lightning_shard.tensor_parallel.styles import ParameterCut, Style, style_of
from lightning_shard.tensor_parallel.wrappers import is_linear, linear_sizes, wrapped_linear

_LEFT_UNSPLIT = ("replicate", "sequence_parallel")
_UNKNOWN = (
    "all_reduce",
    "local_params",
    "moe_identity_expert",
    "packed_rowwise",
    "grouped_gemm",
    "ep_dispatch_experts",
)
_QUERY, _KEYS = ("q_proj", "query"), ("k_proj", "v_proj", "key", "value")


def own_plans(model: nn.Module, num_ranks: int) -> Iterator[PlannedLayer]:
    """Yield the layers that the plans of the Hugging Face models in a model name."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None) if hasattr(type(module), "tp_plan") else None
        if not isinstance(plan, dict) or not plan or (name + ".").startswith(inside or ("\n",)):
            continue
        prefix = f"{name}." if name else ""
        inside = (*inside, prefix)
        named = match_plan(module, _styles(module, plan))
        for layer in _that_divide(list(_with_heads(module, named, num_ranks)), num_ranks):
            yield dataclasses.replace(
                layer, name=prefix + layer.name, pattern=prefix + layer.pattern
            )


def _styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Read a plan's entries; entries that match no module of this model are left out."""
    modules = [name for name, _ in model.named_modules()]
    styles: dict[str, Style] = {}
    for pattern, name in plan.items():
        if name in _UNKNOWN:
            raise _not_supported(model, pattern, name)
        matching = next(filter(matcher_of(pattern).fullmatch, modules), None)
        if name in _LEFT_UNSPLIT or matching is None:
            continue
        if name == "mla_kv_a_proj":
            if (style := _shared_tail(model, matching)) is None:
                raise _not_supported(model, pattern, name)
            styles[pattern] = style
        elif name == "moe_tp_experts":
            styles[pattern] = _experts(pattern, model.get_submodule(matching), plan)
        else:
            styles[pattern] = style_of(_with_count(name), pattern)
    return styles


def _with_count(name: str) -> str:
    return "packed_colwise(2)" if name == "packed_colwise" else name


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
    """Yield the layers of which ranks have equal parts; others are full, with all beside them.

    A region begins and ends in one module. A head whose weight is an embedding's stays with it.
    """
    full = [layer for layer in layers if not cuts_evenly(layer, num_ranks)]
    owners = {layer.name.rpartition(".")[0] for layer in full}
    weights = {param for layer in full for param in layer.module.parameters()}
    for layer in layers:
        is_beside = layer.name.rpartition(".")[0] in owners
        if not is_beside and weights.isdisjoint(layer.module.parameters()):
            yield layer


def _gives_features(module: nn.Module) -> bool:
    return is_linear(module) or wrapped_linear(module) is not None


def _with_heads(
    model: nn.Module, layers: list[PlannedLayer], num_ranks: int
) -> Iterator[PlannedLayer]:
    """Share the heads of keys and values where they are fewer than the ranks."""
    heads: dict[str, int] = {}
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        head_dim = model.get_submodule(parent).__dict__.get("head_dim")
        is_split = layer.style.form == "colwise" and not layer.style.full_output
        if not is_split or not isinstance(head_dim, int) or not _gives_features(layer.module):
            yield layer
            continue
        num_heads = linear_sizes(layer.module)[1] // head_dim
        if name in _QUERY:
            heads[parent] = num_heads
        if name in _KEYS:
            kind = type(model.get_submodule(parent)).__name__
            check_heads(f"{parent} ({kind})", heads.get(parent, num_heads), num_heads, num_ranks)
            layer = dataclasses.replace(layer, style=key_style(num_heads, num_ranks))
        yield layer
