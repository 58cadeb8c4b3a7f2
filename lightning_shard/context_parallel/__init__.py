"""Context parallel: each rank has a part of every sequence between a model's blocks.

A `SequencePart` looks full; `operations` and `attention` have the rules of what is done on parts,
and `cut_blocks` says where these begin and end.
"""

from lightning_shard.context_parallel import (  # noqa: F401  (register their rules)
    attention,
    operations,
)
