"""Context parallel: each rank has a part of every sequence between a model's blocks.

crossings        where activations are cut and full again, and what gradients are there
sequence_part    a part that looks full
operations, attention, after_blocks      what is done on parts
ring, tiles      attention where ranks cannot share out the heads
cut_blocks       where the parts begin and end
"""

from lightning_shard.context_parallel import (  # noqa: F401  (register their rules)
    after_blocks,
    attention,
    operations,
)
