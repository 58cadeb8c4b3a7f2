"""Takes values over that user code has assigned to parameters, before anything reads our buffers.

flats ──assigned()──> values ──adopt──> buffers      and the weights are known to have changed
places ──put_back──> replaced parameters ──┘
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_shard.data_parallel.assigned import ParameterPlaces
from lightning_shard.data_parallel.equal_weights import EqualWeights
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.parameter_shard import ParameterShard
from lightning_shard.data_parallel.sharded_parameter import as_they_are


class Adoption:
    """Takes over what user code has assigned to the parameters of a model.

    Args:
        flats: The buffers of the parameters, which ask for it when they notice one.
        homes: Buffer of each parameter, and its index there.
        places: Where in the model's modules the parameters stand.
        split: How the model is split over other ranks.
        weights: Is told that ranks may have other weights now.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        homes: Mapping[nn.Parameter, tuple[FlatParameters, int]],
        places: ParameterPlaces,
        split: ModelSplit,
        weights: EqualWeights,
    ) -> None:
        self._flats, self._homes, self._places = flats, homes, places
        self._split, self._weights = split, weights
        for flat in flats:
            flat.on_assigned = self._adopt_data

    def adopt(self) -> None:
        """Take over values assigned to `param.data`, and those of parameters that were replaced.

        Raises:
            ConfigError: An assigned value cannot be the parameter's.
        """
        self._adopt_data()
        self._places.put_back(self._adopt_replaced)

    @as_they_are
    def _adopt_data(self) -> None:
        """Copy all assigned values before any is written: they may lie in the buffers."""
        values = [flat.assigned() for flat in self._flats]
        for flat, assigned in zip(self._flats, values, strict=True):
            if assigned:
                flat.adopt(assigned)
                self._weights.note_assigned()

    def _adopt_replaced(self, param: nn.Parameter, value: Tensor) -> None:
        if param in self._homes:
            flat, index = self._homes[param]
            full = value.full_tensor() if isinstance(value, ParameterShard) else value
            own = self._split.local(param, full)
            flat.adopt({index: own.to(flat.full.device, copy=True)})
            self._weights.note_assigned()
