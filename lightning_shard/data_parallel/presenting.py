"""Lets the parameters of an engine look full to user code while they are in shards."""

from collections.abc import Iterable
from functools import partial

from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.gradient_shards import GradientShards
from lightning_shard.data_parallel.sharded_parameter import ParameterHome, UserCode
from lightning_shard.data_parallel.unit import Unit
from lightning_shard.data_parallel.unsharding import Unsharder


def look_full(
    units: Iterable[Unit], shards: GradientShards, unsharder: Unsharder | None
) -> UserCode:
    """Let parameters look full whenever they are in shards and user code runs.

    Args:
        units: Units of a model that is split over no other ranks, from stage 1 on.
        shards: The engine's gradients, which know how each parameter's elements are spread.
        unsharder: Unshards units for autograd; None below stage 3.

    Returns:
        The flag that the caller sets while user code runs.
    """
    user_code = UserCode()

    def home(unit: Unit, flat: FlatParameters, index: int) -> ParameterHome:
        def bring() -> bool:
            return unsharder is not None and unsharder.bring(unit)

        spread = shards.spread_of(flat.params[index])
        return ParameterHome(spread, flat.note(index), user_code, bring)

    for unit in units:
        for flat in unit.flats:
            flat.settle_in(partial(home, unit, flat))
    return user_code
