"""Callbacks that show what a strategy does: the bytes that each rank holds."""

from lightning_shard.profiling.held_bytes import HeldBytesTable

__all__ = ["HeldBytesTable"]
