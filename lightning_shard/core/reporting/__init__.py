"""What ranks write while they train, and the page that is made of it.

    callbacks of `profiling` ──> RUN_DIR/monitor/rank_00000.jsonl  ┐
                                 RUN_DIR/monitor/rank_00001.jsonl  ├─> records ─> figures ─> page
    PipelineTimeline ──────────> RUN_DIR/**/batch_000050.json      ┘

Each rank writes a file of its own, so that a monitored run sends nothing more, waits for nobody,
and leaves what it had written when it is killed. Nothing here imports torch or Lightning.
"""
