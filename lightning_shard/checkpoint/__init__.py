"""Checkpoints in one canonical form: the module's own parameter names and shapes.

    full state, as a single device has it       full, optimizer_state, user_shards
    the section of our strategies, its number   section
    what each rank keeps, its random streams    by_rank, random_state
    does a checkpoint fit the run               resuming, misfits
    folders of a run, and what they ask of it   run_folders
    which checkpoints there are, and since when files.parts
    one rank's shards at a step boundary        rank_snapshot, state_entries, host_buffers

The state of compression is written and read in `data_parallel.compression.state`, below local SGD,
which needs it.
"""
