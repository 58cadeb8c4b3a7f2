"""A c10d process group over mpi4py: torch's wheels carry no MPI.

MPI moves bytes and this package does the arithmetic, for every dtype and every `ReduceOp`, with the
bits of the in-process backend.

    torch.distributed ─► MPIGroup ─► a generator per operation, which yields MPI requests and
                                     goes on once they are complete
                          MPIWork ─► MPIFlight ◄─ ProgressThread (when nobody waits)
"""
