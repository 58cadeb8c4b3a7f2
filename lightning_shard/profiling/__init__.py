"""Callbacks that show what a strategy does: the bytes that ranks hold, and when they are idle."""

from lightning_shard.profiling.compression_ratio import CompressionRatio
from lightning_shard.profiling.held_bytes import HeldBytesTable
from lightning_shard.profiling.pipeline_timeline import PipelineTimeline

__all__ = ["CompressionRatio", "HeldBytesTable", "PipelineTimeline"]
