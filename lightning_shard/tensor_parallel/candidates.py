"""Layers that may be split together: found by the sizes and names of a module's linear layers.

    attention    q, k, v (colwise) ──> heads ──> out (rowwise)        owner counts heads
                 qkv (packed colwise) ─┘
                 the same, sharded     C // self.num_heads, view(B, T, C) ...: as if full
    pair         up [, gate] (colwise) ──> element by element ──> down (rowwise)

A candidate is a guess, which `probe` tries out, or which is believed by usual names.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.heads import HEADS
from lightning_shard.tensor_parallel.layers import is_transposed
from lightning_shard.tensor_parallel.styles import STYLES, Style
from lightning_shard.tensor_parallel.wrappers import linear_sizes

IsFree = Callable[[nn.Module], bool]

_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
_OUTPUT = re.compile(
    r"(.*\.)?(o|wo|out|o_proj|out_proj|out_lin|to_out(\.0)?|c_proj|proj|dense|output\.dense|"
    r"att\w*_out(put)?)"
)
_PAIRS = (  # the last one leads back
    *(("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"), ("up", "down")),
    *(("fc1", "fc2"), ("w1", "w3", "w2"), ("w1", "w2"), ("c_fc", "c_proj"), ("lin1", "lin2")),
    *(("wi", "wo"), ("wi_0", "wi_1", "wo"), ("linear1", "linear2")),
    ("intermediate.dense", "output.dense"),
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Layers of a module that may be split together."""

    owner: nn.Module
    styles: dict[str, Style]
    out: str
    is_known: bool
    num_heads: int | None = None
    is_attention: bool = False

    @property
    def signature(self) -> tuple[object, ...]:
        """Properties that candidates have alike when a trial of one tells for all."""
        sizes = [(name, param.shape) for name, param in self.owner.named_parameters()]
        return (type(self.owner), self.num_heads, tuple(self.styles.items()), *sizes)

    @property
    def counts_heads(self) -> bool:
        """Whether the attention's module is told that a rank has fewer heads."""
        return self.is_attention and not any(one.lazy_output for one in self.styles.values())

    @property
    def is_all(self) -> bool:
        """Whether the owner has no parameters but those of the layers."""
        own = {
            param for name in self.styles for param in self.owner.get_submodule(name).parameters()
        }
        return own == set(self.owner.parameters())


def check_heads(name: str, num_heads: int, num_key_heads: int, num_ranks: int) -> None:
    """Raise unless the ranks can share the heads."""

    def fits(size: int) -> bool:
        one_way = num_key_heads % size == 0 or size % num_key_heads == 0
        return num_heads % size == 0 and one_way

    if not fits(num_ranks):
        fitting = ", ".join(str(n) for n in range(1, num_heads + 1) if fits(n))
        keys = "" if num_key_heads == num_heads else f", and {num_key_heads} of keys and values"
        raise ConfigError(
            f"{name} has {num_heads} heads{keys}, which {num_ranks} ranks cannot share; expected "
            f"a tensor_parallel_size of {fitting}."
        )


def key_style(num_key_heads: int, num_ranks: int) -> Style:
    """Return the style of a projection to keys or values: split by heads, or heads shared."""
    if num_key_heads % num_ranks == 0:
        return STYLES["colwise"]
    return Style(form="shared", num_blocks=num_key_heads, full_output=False)


def find_attention(owner: nn.Module, num_ranks: int, is_free: IsFree) -> Iterator[Candidate]:
    """Yield the ways in which a module may be an attention, the likeliest first."""
    for prefix, counting, inlet, out in _inlets(owner, is_free):
        num_heads = _num_heads(counting)
        is_counted = num_heads is not None and inlet.width % num_heads == 0
        if inlet.fused is None or is_counted:
            styles = inlet.styles_for(counting, num_ranks)
            yield Candidate(
                owner=owner,
                styles=styles | _head_biases(counting, prefix) | {out: STYLES["rowwise"]},
                out=out,
                is_known=inlet.is_known,
                num_heads=num_heads,
                is_attention=True,
            )


def find_full_width_attention(
    owner: nn.Module, num_ranks: int, is_free: IsFree
) -> Iterator[Candidate]:
    """Yield the ways in which a module may be an attention that computes with the whole width."""
    for prefix, counting, inlet, out in _inlets(owner, is_free):
        if any(linear_sizes(one)[1] % num_ranks for one in inlet.layers.values()):
            continue
        num_blocks = 1 if inlet.fused is None else inlet.fused.num_blocks
        sharded = Style(form="colwise", num_blocks=num_blocks, lazy_output=True)
        biases = dict.fromkeys(_head_biases(counting, prefix), STYLES["colwise_parted"])
        of_heads = dict.fromkeys(inlet.layers, sharded) | biases
        yield Candidate(
            owner=owner,
            styles=of_heads | {out: STYLES["rowwise_split_input"]},
            out=out,
            is_known=False,
            num_heads=_num_heads(counting),
            is_attention=True,
        )


def find_pairs(owner: nn.Module, num_ranks: int, is_free: IsFree) -> Iterator[Candidate]:
    """Yield the pairs that a module may have of layers to a hidden width and back."""
    near = dict(_near(owner, is_free))
    place = {name: position for position, name in enumerate(near)}
    by_sizes: dict[tuple[int, int], list[str]] = {}
    for name, one in near.items():
        by_sizes.setdefault(linear_sizes(one), []).append(name)
    for out in near:
        hidden, width = linear_sizes(near[out])
        if hidden < width or hidden % num_ranks:
            continue
        ups = [name for name in by_sizes.get((width, hidden), ()) if name != out]
        before = [name for name in ups if place[name] < place[out]]
        for chosen in dict.fromkeys((tuple(ups), tuple(before[-1:]))):
            if before and len(chosen) <= 2:
                yield Candidate(
                    owner=owner,
                    styles=dict.fromkeys(chosen, STYLES["colwise"]) | {out: STYLES["rowwise"]},
                    out=out,
                    is_known=(*chosen, out) in _PAIRS,
                )
        for name in by_sizes.get((width, 2 * hidden), ()):
            if place[name] < place[out]:
                styles = {name: _packed(2), out: STYLES["rowwise"]}
                yield Candidate(owner=owner, styles=styles, out=out, is_known=False)


@dataclass(frozen=True, kw_only=True)
class _Inlet:
    """The projections to query, key and value: three, or a fused one."""

    layers: dict[str, nn.Module]
    width: int
    is_known: bool
    fused: Style | None = None

    def styles_for(self, counting: nn.Module, num_ranks: int) -> dict[str, Style]:
        names = list(self.layers)
        num_heads = _num_heads(counting)
        if self.fused is not None:
            assert num_heads is not None
            check_heads(type(counting).__name__, num_heads, num_heads, num_ranks)
            return {names[0]: self.fused}
        if num_heads is None:
            return dict.fromkeys(names, STYLES["colwise"])
        num_key_heads = num_heads * linear_sizes(self.layers[names[1]])[1] // self.width
        check_heads(type(counting).__name__, num_heads, num_key_heads, num_ranks)
        of_keys = key_style(num_key_heads, num_ranks)
        return {names[0]: STYLES["colwise"], names[1]: of_keys, names[2]: of_keys}


def _inlets(owner: nn.Module, is_free: IsFree) -> Iterator[tuple[str, nn.Module, _Inlet, str]]:
    """Yield projections in a module: their prefix, who counts their heads, and the last layer."""
    near = dict(_near(owner, is_free))
    by_prefix: dict[str, dict[str, nn.Module]] = {}
    for name, one in near.items():
        by_prefix.setdefault(_prefix(name), {})[name] = one
    for prefix, own in by_prefix.items():
        counting = owner.get_submodule(prefix.rstrip("."))
        for inlet in (*_separate(own, prefix, counting), *_fused(own)):
            if (out := _output(near, inlet, prefix)) is not None:
                yield prefix, counting, inlet, out


def _packed(num_blocks: int) -> Style:
    return Style(form="colwise", num_blocks=num_blocks, full_output=False)


def _num_heads(module: nn.Module) -> int | None:
    """Return the number of heads that a module's attributes say, or None."""
    for name in HEADS:
        if isinstance(count := module.__dict__.get(name), int) and count > 0:
            return count
    return None


def _near(owner: nn.Module, is_free: IsFree) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers of a module and of its children."""
    for name, child in owner.named_children():
        if is_free(child):
            yield name, child
            continue  # what is in a wrapper goes with it
        for inner, grandchild in child.named_children():
            if is_free(grandchild):
                yield f"{name}.{inner}", grandchild


def _prefix(name: str) -> str:
    return name[: name.rfind(".") + 1]


def _separate(own: dict[str, nn.Module], prefix: str, counting: nn.Module) -> Iterator[_Inlet]:
    for triple in _PROJECTIONS:
        names = [prefix + one for one in triple]
        if all(name in own for name in names):
            layers = {name: own[name] for name in names}
            width = linear_sizes(own[names[0]])[1]
            # Of heads that nobody counts only a trial can tell whether they are cut in the middle.
            is_known = _num_heads(counting) is not None
            yield _Inlet(layers=layers, width=width, is_known=is_known)


def _fused(own: dict[str, nn.Module]) -> Iterator[_Inlet]:
    for name, module in own.items():
        inputs, outputs = linear_sizes(module)
        if outputs != 3 * inputs:
            continue
        layers = {name: module}
        is_known = is_transposed(module)  # of GPT-2
        yield _Inlet(layers=layers, width=inputs, is_known=is_known, fused=_packed(3))
        yield _Inlet(layers=layers, width=inputs, is_known=False, fused=STYLES["colwise"])


def _output(near: dict[str, nn.Module], inlet: _Inlet, prefix: str) -> str | None:
    """Return the path of an attention's last layer, found by its name or as the only fitting."""
    width = linear_sizes(next(iter(inlet.layers.values())))[0]
    sized = [
        name
        for name, one in near.items()
        if name not in inlet.layers and linear_sizes(one) == (inlet.width, width)
    ]
    named = [name for name in sized if _OUTPUT.fullmatch(name)]
    named.sort(key=lambda name: _prefix(name) != prefix)
    return named[0] if named else sized[0] if len(sized) == 1 else None


def makes_head_biases(owner: nn.Module) -> bool:
    """Whether a module has a table with a column for each of its heads."""
    return any(_head_biases(one, "") for one in owner.modules())


def _head_biases(counting: nn.Module, prefix: str) -> dict[str, Style]:
    """Return the embeddings with a column for each head, such as T5's of relative positions."""
    num_heads = _num_heads(counting)
    return {
        f"{prefix}{name}": STYLES["colwise"]
        for name, child in counting.named_children()
        if isinstance(child, nn.Embedding) and child.embedding_dim == num_heads
    }
