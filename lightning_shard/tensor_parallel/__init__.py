"""Tensor parallelism: wide layers in parts over the ranks of a group, in unmodified models.

    plan ──► match_plan ──► SplitModel ──┬─► Sharding: which part of each parameter is here
    patterns, styles                     └─► layers: the parallel forward, over regions
"""
