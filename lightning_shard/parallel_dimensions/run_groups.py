"""The groups that a rank is in, by what their ranks have in common and what not.

samples      other samples: loaders, random numbers, metrics, logged and gathered values
gradients    the same parameters, other activations: those above, and ranks that compute other
             parts of one sample. Engines, their state and batch norms
of_parts     of those, the ranks that have the same parts of what is shared out: of experts
model        the same samples: all axes of the dimensions together
along        each of these axes alone
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class RunGroups:
    """A rank's groups in a run whose ranks share models.

    Attributes:
        samples: The ranks that are given other samples.
        gradients: Those that average gradients, and how they share out the state.
        model: Those that share one model, and are given the same samples.
        of_parts: Those that average gradients of what is shared out, and second groups of them for
            gradients; None where nothing is.
        along: Those that share it along one axis.
    """

    samples: Collectives
    gradients: DataGroups
    model: Collectives
    along: Mapping[Axis, Collectives]
    of_parts: tuple[DataGroups, DataGroups] | None = None
