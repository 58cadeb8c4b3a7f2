"""Lightning `ClusterEnvironment`s: who am I, and how many are we; and which of them is used.

Lightning found           the ranks were started by     used
MPIEnvironment            mpirun                        ours
LightningEnvironment      mpirun, mpi4py missing        ours: else each rank trains alone
SLURMEnvironment          mpirun, inside a SLURM job    ours: srun's numbers are not the ranks'
any                       backend "mpi"                 ours: its ranks are MPI's
LightningEnvironment,     Ray Train                     ours: what Ray inherits from srun, and
  Ray's, SLURMEnvironment                               torch's variables, are not the ranks'
any other                                               what was found
"""

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment as LightningMPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_shard.core import settings
from lightning_shard.environments.mpi import MPIEnvironment
from lightning_shard.environments.ray import RayEnvironment
from lightning_shard.errors import ConfigError


def fitting_environment(found: ClusterEnvironment, *, uses_mpi: bool) -> ClusterEnvironment:
    """Return `found`, or our MPIEnvironment in its place.

    Args:
        found: The cluster environment that Lightning detected or the user passed.
        uses_mpi: Whether the ranks talk over MPI. MPI's ranks are then counted, and each must call.
    """
    if isinstance(found, MPIEnvironment | RayEnvironment):
        return found
    if RayEnvironment.detect():
        return _in_worker_of_ray(found, uses_mpi=uses_mpi)
    started_by_mpi = MPIEnvironment.detect()
    mistaken = type(found) in (LightningEnvironment, SLURMEnvironment) and started_by_mpi
    if not (uses_mpi or mistaken or isinstance(found, LightningMPIEnvironment)):
        return found
    if isinstance(found, TorchElasticEnvironment):
        raise ConfigError(
            "The backend 'mpi' needs ranks that mpirun has started, but torchrun has started this "
            "one (TORCHELASTIC_RUN_ID is set). Start `mpirun -n N python ...`, or pass another "
            "backend."
        )
    environment = MPIEnvironment()
    if isinstance(found, SLURMEnvironment) and not started_by_mpi:
        _check_srun_told_mpi(environment.world_size())
    return environment


def _in_worker_of_ray(found: ClusterEnvironment, *, uses_mpi: bool) -> ClusterEnvironment:
    if uses_mpi:
        raise ConfigError(
            "The backend 'mpi' needs ranks that mpirun has started, but Ray Train has started this "
            "one. Pass backend='auto' (NCCL on GPUs, shared memory or Gloo on CPUs)."
        )
    mistaken = isinstance(found, LightningEnvironment) or type(found) is SLURMEnvironment
    return RayEnvironment() if mistaken else found


def _check_srun_told_mpi(world_size: int) -> None:
    num_tasks = settings.integer("SLURM_NTASKS", "the number of tasks that srun started")
    if num_tasks != world_size:
        raise ConfigError(
            f"SLURM_NTASKS is {num_tasks}, but MPI.COMM_WORLD has {world_size} rank(s): srun has "
            "not told MPI of the others. Start `srun --mpi=pmix python ...` (`srun --mpi=list` "
            "says what there is), or use mpirun."
        )
