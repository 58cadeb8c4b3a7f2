"""Tensor parallelism: wide layers are split over the ranks of a group, in unmodified models.

    plan ──► SplitModel ──┬── Sharding       which part of each parameter is here
                          ├── layers         the parallel forwards, over `regions`
                          └── DimShardedTensor   logits, slices of the sequence, and heads of
                                             attention, that look full

A plan is given as patterns and styles, a Hugging Face model's own, or found and tried out.
"""

from lightning_shard.tensor_parallel import dim_sharded_operations  # noqa: F401  (registers its rules)
