"""Tensor parallelism: wide layers are split over the ranks of a group, in unmodified models.

The plan says which layers, and how: given as patterns and styles (`plan`, `styles`), a Hugging Face
model's own, or found (`automatic`, `candidates`, `probe`). `SplitModel` applies it and undoes it:

    plan ──► SplitModel ──┬── Sharding       which part of each parameter is here
                          ├── layers         the parallel forwards, over `regions`
                          └── DimShardedTensor   logits, slices of the sequence, and heads of
                                             attention, that look full
"""

from lightning_shard.tensor_parallel import dim_sharded_operations  # noqa: F401  (registers its rules)
