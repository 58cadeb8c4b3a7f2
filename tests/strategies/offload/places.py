"""Where state lies in host memory: a strategy's class, and what its option is."""

from typing import Any

from lightning_shard import ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.strategies.parity import SMALL_BUCKET_MB, UPSTREAM_WARNINGS

PLACES: dict[str, tuple[type[DataParallelStrategy], str]] = {
    "zero1": (ZeRO1Strategy, "optimizer"),
    "zero2": (ZeRO2Strategy, "optimizer"),
    "zero3": (ZeRO3Strategy, "optimizer"),
    "zero3-parameters": (ZeRO3Strategy, "parameters"),
}
WARNINGS = (*UPSTREAM_WARNINGS, ".*saves nothing on CPU ranks")


def offloaded(place: str, **options: Any) -> DataParallelStrategy:
    """Return a strategy on ranks of this process."""
    kind, offload = PLACES[place]
    return kind(backend="in_process", offload=offload, bucket_mb=SMALL_BUCKET_MB, **options)
