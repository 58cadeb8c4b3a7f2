"""A check that a given plan cuts fused projections in the way that their module reads them.

    [ q | k | v ]               packed_colwise(3)      qkv.chunk(3), view(B, T, 3, heads, width)
    [ q0 k0 v0 | q1 k1 v1 ]     colwise                view(B, T, heads, 3, width)

Cut in the other way, every rank gets activations of the right shape: a model trains, but it is
another model. So the layout that a given plan says is compared with the one that a trial finds.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.styles import style_name
from lightning_shard.tensor_parallel.wrappers import linear_sizes


def check_layouts(model: nn.Module, layers: Sequence[PlannedLayer], num_ranks: int) -> None:
    """Compare the fused layers of a given plan with a plan that was tried out.

    Args:
        model: The full model.
        layers: The layers of the given plan.
        num_ranks: Number of ranks of the tensor-parallel group.

    Raises:
        ConfigError: A trial finds that a layer is laid out otherwise.
    """
    fused = {layer.module: layer for layer in _fused(layers)}
    if not fused or num_ranks == 1:
        return
    try:
        tried = automatic_plan(model, num_ranks).layers
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
            taken.setdefault(_parent(layer), set()).add(linear_sizes(layer.module)[0])
    for layer in layers:
        feeds = layer.style.form == "colwise" and not layer.style.full_output
        if feeds and not isinstance(layer.module, nn.Embedding):
            outputs = linear_sizes(layer.module)[1]
            if layer.style.num_blocks > 1 or outputs not in taken.get(_parent(layer), {outputs}):
                yield layer


def _parent(layer: PlannedLayer) -> str:
    return layer.name.rpartition(".")[0]
