"""A c10d process group over mpi4py: torch's wheels carry no MPI.

MPI moves bytes and this package does the arithmetic, so that every dtype and every `ReduceOp`
works, sums of halves are made in float32, and the bits are those of the in-process backend.

    torch.distributed ─► MPIGroup ─► OPERATIONS: one generator per operation, which yields MPI
                                     requests and goes on once they are complete
                          MPIWork ─► Flight ◄─ Progress (a thread, when nobody waits)
"""

from lightning_shard.backends.mpi.backend import MPIBackend

__all__ = ["MPIBackend"]
