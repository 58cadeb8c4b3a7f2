"""A c10d process group over shared memory, for CPU ranks of one host; see `two_levels` for several.

    rank 0   heap [ doorbell | board of group 0 | parameters | gradients | staged copies ... ]
                       ▲             │                 │
    rank 1             └── rings     └── reads         └── reads in place

Each process has one heap, memory without a name, which the other ranks map. A tensor that lies
there is read where it is; any other is copied there first. What a rank offers, and what it has
read, stands on its board. Nobody writes another's heap but its doorbell.

    torch.distributed ─► ShmGroup ─► a generator per operation, which yields what it
                                     waits for on the boards
                          ShmWork ─► ShmFlight ◄─ ProgressThread (when nobody waits)
"""
