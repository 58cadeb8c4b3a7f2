"""Shards, their gradients and optimizer state in host memory (ZeRO-Offload), and activations.

    device   full parameters ──backward──> gradients ──reduce──> shard of gradients
                   ^                                                    │ down, as soon as reduced
                   │ up, after the update                               v
    host     updated shard  <──────── the optimizer's step ──── shard of gradients

`copier` moves the bytes and counts them, its `HostShard` is the shard that the optimizer updates,
`HostGradients` holds the averages that it reads. Source: ZeRO-Offload, arXiv:2101.06840. What
autograd saves is another matter: `activations` has it go down and up, in `stretch`es of memory.
"""
