"""The section of a checkpoint that only this package's strategies read, and its format number.

    checkpoint["lightning_shard"] = {"format": 3, "compression": ..., "rank_0": ..., "rank_1": ...}

Everything else in a checkpoint is Lightning's and torch's. A section without a number is of format
1, which was written before there were numbers: it has means of what ranks keep. Format 2 has what
each rank keeps, too, see `by_rank`. Format 3 has that alone: who needs a mean takes it when it
loads. The number changes when an older version of this package would misread what a newer one
writes, or go on from less than there is.
"""

from collections.abc import Mapping
from typing import Any

from lightning_shard.errors import CheckpointError

CHECKPOINT_KEY = "lightning_shard"
FORMAT = 3


def writable_section(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the section of a checkpoint that is about to be saved, with its format's number."""
    section: dict[str, Any] = checkpoint.setdefault(CHECKPOINT_KEY, {})
    section["format"] = FORMAT
    return section


def section_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of a checkpoint that was loaded; empty where it has none.

    Raises:
        CheckpointError: A newer version of this package has written it.
    """
    section: Mapping[str, Any] = checkpoint.get(CHECKPOINT_KEY, {})
    number = section.get("format", 1)
    if not isinstance(number, int) or number > FORMAT:
        raise CheckpointError(
            f"This checkpoint's section {CHECKPOINT_KEY!r} has format {number!r}, expected at most "
            f"{FORMAT}: a newer lightning-shard has written it. Install that version or a "
            f"later one (pip install -U lightning-shard), or load the weights alone with "
            f"load_from_checkpoint."
        )
    return section
