"""Checkpoints of the sharded format that are written while training goes on.

    rank 0   copy ─┬─ steps ─────────┬─ steps ───────────┬─ steps
             plan  │ writer: my file │ index, rename     │ complete
    rank 1   copy ─┼─ steps ─────────┼─ steps ───────────┼─ steps
                   │ writer: my file │                   │
                   └ all ranks talk  └ at boundaries     └ of steps only

torch's `async_save` is not used: its thread (or process) talks to other ranks while training does,
which needs a second group and mixes up collectives where ranks are threads; its stagers copy all
that a rank has, before it is known which rank writes what; and its failures are in a future that
each rank sees at another step. Writers here are threads that talk to no other rank.
"""
