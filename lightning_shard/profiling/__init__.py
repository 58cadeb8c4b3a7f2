"""Callbacks that show what a strategy does: bytes that ranks hold and send, and how time passes."""

from lightning_shard.core.reporting.page import Report
from lightning_shard.profiling.pipeline_timeline import PipelineTimeline
from lightning_shard.profiling.run_monitor import PlanMonitor
from lightning_shard.profiling.savings import (
    CompressionRatio,
    ExpertBalance,
    HeldBytesTable,
    MemoryMonitor,
)
from lightning_shard.profiling.step_monitor import StepMonitor, TrafficMonitor

__all__ = [
    "CompressionRatio",
    "ExpertBalance",
    "HeldBytesTable",
    "MemoryMonitor",
    "PipelineTimeline",
    "PlanMonitor",
    "Report",
    "StepMonitor",
    "TrafficMonitor",
]
