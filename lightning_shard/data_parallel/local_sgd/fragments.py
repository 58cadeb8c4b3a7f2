"""Cutting a model into fragments of about equal size, in the order of the engine's buffers.

    parameters   a b c d e f g h      2 fragments   a b c | d e f g h

A fragment is a run of full parameters: an outer optimizer and a compressor see their shapes, and
sizes come out more even than with whole blocks, of which streaming DiLoCo (arXiv:2501.18512) makes
its fragments.
"""

from collections.abc import Mapping

from lightning_shard.errors import ConfigError


def cut_into_fragments(numels: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    """Assign each parameter to a fragment.

    Args:
        numels: Number of elements of each parameter, by name, in order.
        num_fragments: Number of fragments.

    Returns:
        The parameters' names of each fragment; none is empty.

    Raises:
        ConfigError: There are fewer parameters than fragments.
    """
    if num_fragments > len(numels):
        raise ConfigError(
            f"fragments={num_fragments}, but the model has {len(numels)} parameters to cut into "
            f"fragments, expected at least one for each. Use fewer fragments."
        )
    names, total, last = list(numels), max(sum(numels.values()), 1), num_fragments - 1
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    before, current = 0, 0
    for place, name in enumerate(names):
        middle = (before + numels[name] / 2) / total
        # at most one further, and in time for the last parameters to fill the last fragments
        wanted = min(int(middle * num_fragments), current + bool(fragments[current]), last)
        current = max(current, wanted, num_fragments - (len(names) - place))
        fragments[current].append(name)
        before += numels[name]
    return fragments
