"""Checkpoints of the sharded format that are written while training goes on.

    one save, from its copy in host memory to its place      save_in_flight
    a rank's saves, and where in a run they end              background_saves

    rank 0   copy ─┬─ steps ─────────┬─ steps ───────────┬─ steps
             plan  │ writer: my file │ index, rename     │ complete
    rank 1   copy ─┼─ steps ─────────┼─ steps ───────────┼─ steps
                   │ writer: my file │                   │
                   └ all ranks talk  └ at boundaries     └ of steps only

Writers are threads that hold no lock of training and talk to no other rank. A folder is in its
place once all of it is on the disk; until then it has the name of a leftover.

torch's `async_save` is not used: its thread (or process) talks to other ranks while training does,
which needs a second group and mixes up collectives where ranks are threads; its stagers copy all
that a rank has, before it is known which rank writes what; and its failures are in a future that
each rank sees at another step.
"""
