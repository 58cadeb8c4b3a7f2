"""A c10d process group over mpi4py: torch's wheels carry no MPI.

MPI moves bytes and this package does the arithmetic: every dtype and every `ReduceOp` works, halves
are summed in float32, and the results equal those of the in-process backend bit for bit.

    torch.distributed ─► MPIGroup ─► OPERATIONS: one generator per operation, which yields MPI
                                     requests and goes on once they are complete
                          MPIWork ─► MPIFlight ◄─ ProgressThread (when nobody waits)
"""

from lightning_shard.backends.mpi.backend import MPIBackend

__all__ = ["MPIBackend"]
