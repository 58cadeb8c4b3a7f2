"""Lightning asks MPI how many ranks there are; here it does so only where MPI has started them.

To ask starts MPI, and Open MPI then listens on all addresses of the host, in every rank of a run
that has nothing to do with it.
"""

import sys
from typing import Any

from lightning_shard.core import settings


def ask_mpi_under_mpi_alone(fabric: str) -> None:
    """Have this root of Fabric look at the variables of MPI's launchers before it asks MPI.

    Args:
        fabric: The root, which is imported: "lightning.fabric" or "lightning_fabric".
    """
    environment: Any = sys.modules[f"{fabric}.plugins.environments.mpi"].MPIEnvironment
    asks = environment.detect

    def detect() -> bool:
        """Whether MPI has started several ranks."""
        return settings.is_under_mpi() and asks()

    environment.detect = staticmethod(detect)
