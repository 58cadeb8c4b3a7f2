"""Shards, their gradients and optimizer state in host memory (ZeRO-Offload), and activations.

    device   full parameters ──backward──> gradients ──reduce──> shard of gradients
                   ^                                                    │ down, as soon as reduced
                   │ up, after the update                               v
    host     updated shard  <──────── the optimizer's step ──── shard of gradients

Source: ZeRO-Offload, arXiv:2101.06840.
"""
