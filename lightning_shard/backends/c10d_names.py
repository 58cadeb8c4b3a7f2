"""The c10d functions that changed their names, under one name each.

torch 2.13 renamed `reduce_scatter_tensor` and `all_gather_into_tensor` to `reduce_scatter_single`
and `all_gather_single`; the old names warn from then on, and the new ones are unknown before.
"""

import torch.distributed as dist

if hasattr(dist, "reduce_scatter_single"):
    reduce_scatter_flat = dist.reduce_scatter_single
    all_gather_flat = dist.all_gather_single
else:
    reduce_scatter_flat = dist.reduce_scatter_tensor
    all_gather_flat = dist.all_gather_into_tensor
