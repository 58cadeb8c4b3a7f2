"""Wrapped linear layers: adapters are split as the layer that they adapt.

    colwise    x ──┬──> base (by outputs) ──────────────────┐
                   └──> A (full) ───> B (by outputs) ───────┴─> features
    rowwise    x_r ┬──> base (by inputs) ──sum──────────────┐
                   └──> A (by inputs) ──sum──> B (full) ────┴─> full

A wrapper is known by its layers: a linear layer, and pairs of thin ones from its inputs to a few
features and from there to its outputs (LoRA). A copy that is trained in a layer's place (peft's
`modules_to_save`) is split as the layer is. A wrapper that is built in another way (DoRA, LoHa)
computes the same on every rank, of which each takes its features.
"""

import dataclasses

from torch import Tensor, nn

from lightning_shard.tensor_parallel.layers import has_weight, is_plain_linear, is_transposed
from lightning_shard.tensor_parallel.rounded import is_rounded, shape_of
from lightning_shard.tensor_parallel.styles import Style

_BASE, _ORIGINAL, _COPIES = "base_layer", "original_module", "modules_to_save"  # peft's names
_LINEAR_FORMS = ("colwise", "rowwise", "shared")


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Return the widths of a linear layer's input and output; of a wrapper, its layer's."""
    base = wrapped_linear(module) or module
    rows, columns = shape_of(_weight(base))
    return (rows, columns) if is_transposed(base) else (columns, rows)


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is linear, with whatever forward, and its weight a parameter."""
    return has_weight(module) and (isinstance(module, nn.Linear) or is_transposed(module))


def wrapped_linear(module: nn.Module) -> nn.Module | None:
    """Return the linear layer that a module is wrapped around, or None.

    It has peft's name, or is the largest of which all other matrices are thinner.
    """
    if is_linear(module) or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return None
    named = module._modules.get(_BASE) or module._modules.get(_ORIGINAL)
    if named is not None:
        return named if is_linear(named) else wrapped_linear(named)
    children = [one for one in module.children() if is_linear(one)]
    if not children:
        return None
    base = max(children, key=lambda one: _weight(one).numel())
    thin = min(_weight(base).shape)
    own = set(base.parameters())
    others = [param for param in module.parameters() if param not in own and param.ndim > 1]
    is_wrapper = bool(others) and all(
        param.ndim == 2 and min(param.shape) < thin for param in others
    )
    return base if is_wrapper else None


def has_adapter(module: nn.Module) -> bool:
    """Whether a module has more than a linear layer, beside it or around it."""
    return wrapped_linear(module) is not None or (is_linear(module) and not _is_bare(module))


def wrapped_embedding(module: nn.Module) -> nn.Embedding | None:
    """Return the embedding that a module is wrapped around by peft's names, or None."""
    named = module._modules.get(_BASE) or module._modules.get(_ORIGINAL)
    return named if isinstance(named, nn.Embedding) and has_weight(named) else None


def is_low_rank(module: nn.Module) -> bool:
    """Whether a wrapper is a linear layer beside pairs of thin ones, and nothing else."""
    return bool(_pairs(module))


def inner_styles(module: nn.Module, style: Style) -> dict[str, Style]:
    """Return how the layers in a planned module are split, by their paths in it."""
    if copies := copies_in(module):
        return dict.fromkeys(copies, style)
    if wrapped_embedding(module) is not None:
        return {_BASE: style}
    if style.form == "shared" and is_rounded(wrapped_linear(module) or module):
        return {"": unsplit_style(style)}  # no head's rows are taken out of its weight
    if style.form not in _LINEAR_FORMS or isinstance(module, nn.Embedding) or _is_bare(module):
        return {"": style}
    around = dataclasses.replace(style, form="unsplit", full_input=True, full_output=True)
    pairs = _pairs(module)
    if not pairs:
        return {"": unsplit_style(style)}
    (base,) = [name for name, one in module.named_modules() if one is wrapped_linear(module)]
    split = [up for _, up in pairs] if style.form != "rowwise" else [down for down, _ in pairs]
    inner = dict.fromkeys([base, *split], style)
    return inner if style.form == "rowwise" else {"": around, **inner}


def unsplit_style(style: Style) -> Style:
    """Return the style of a layer that computes the same on every rank, in place of `style`."""
    form = "unsplit_shared" if style.form == "shared" else "unsplit"
    return dataclasses.replace(style, form=form)  # type: ignore[arg-type]


def bias_of(module: nn.Module) -> Tensor | float:
    """Return the bias of a linear layer or a low-rank wrapper, which is added once."""
    pairs = _pairs(module)
    base = wrapped_linear(module) if pairs else module
    layers = [base, *(module.get_submodule(up) for _, up in pairs)]
    return sum(
        (bias.detach() for one in layers if (bias := getattr(one, "bias", None)) is not None), 0.0
    )


def _is_bare(module: nn.Module) -> bool:
    """Whether a linear layer has no parameters beside its weight and bias."""
    return is_linear(module) and {name for name, _ in module.named_parameters()} <= {
        "weight",
        "bias",
    }


def copies_in(module: nn.Module) -> list[str]:
    """Return the paths of a layer and of the copies that are trained in its place."""
    copies = module._modules.get(_COPIES)
    if module._modules.get(_ORIGINAL) is None or copies is None:
        return []
    paths = [_ORIGINAL, *(f"{_COPIES}.{name}" for name in copies._modules)]
    layers = [module.get_submodule(path) for path in paths]
    kinds = (is_linear, lambda one: isinstance(one, nn.Embedding) and has_weight(one))
    is_alike = any(all(map(kind, layers)) for kind in kinds)
    return paths if is_alike and len({_weight(one).shape for one in layers}) == 1 else []


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Return the paths of the thin layers beside a wrapped one, that to few features first."""
    # Empty where the wrapper has other parameters, too, or none.
    base = wrapped_linear(module)
    if base is None or not is_plain_linear(base):
        return []
    inputs, outputs = linear_sizes(base)
    thin = {
        name: one
        for name, one in module.named_modules()
        if is_plain_linear(one) and one is not base
    }
    known = {param for one in (base, *thin.values()) for param in one.parameters()}
    if known != set(module.parameters()):
        return []
    downs = [name for name, one in thin.items() if linear_sizes(one)[0] == inputs]
    ups = [name for name in thin if name not in downs]
    ranks = [linear_sizes(thin[name])[1] for name in downs]
    fits = [linear_sizes(thin[name]) for name in ups] == [(rank, outputs) for rank in ranks]
    return list(zip(downs, ups, strict=True)) if fits and max(ranks, default=0) < inputs else []


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight
