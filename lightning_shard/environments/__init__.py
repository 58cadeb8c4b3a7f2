"""Lightning `ClusterEnvironment`s: who am I, and how many are we."""

from lightning_shard.environments.checks import check_adopted, check_environment
from lightning_shard.environments.elastic import ElasticEnvironment, elastic_environment
from lightning_shard.environments.mpi import MPIEnvironment
from lightning_shard.environments.ray import RayEnvironment, check_num_devices
from lightning_shard.environments.selection import fitting_environment
from lightning_shard.environments.started_elsewhere import InProcessEnvironment

__all__ = [
    "ElasticEnvironment",
    "InProcessEnvironment",
    "MPIEnvironment",
    "RayEnvironment",
    "check_adopted",
    "check_environment",
    "check_num_devices",
    "elastic_environment",
    "fitting_environment",
]
