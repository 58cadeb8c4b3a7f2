"""Where a rank was at a time-out: a file with its last operations, and its threads' Python stacks.

A time-out says which rank was missed. Why it did not come stands in that rank's own stacks: it
computes for long, waits for a file, or is in another operation than the rest.
"""

import os
import platform
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable

from lightning_shard.backends.liveness.report import Activity

KEPT = 64
"""How many beginnings and ends of operations a rank remembers."""


def write_stacks(
    rank: int, world_size: int, reason: str, recent: Iterable[Activity], now: float
) -> str:
    """Write this rank's last operations and all its threads' stacks into a new file of its own.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        reason: Why it is written, in words.
        recent: Beginnings and ends of operations, the oldest first.
        now: Seconds on the clock of `recent`.

    Returns:
        The file's path, in the folder for temporary files (TMPDIR), which this user alone can read;
        "" where it cannot be written.
    """
    lines = [
        f"rank {rank} of {world_size}, process {os.getpid()} on {platform.node()}: {reason}",
        "",
        "Its last operations:",
        *(f"  {_told(one, now)}" for one in recent),
        "",
        *_stacks(),
    ]
    try:
        number, path = tempfile.mkstemp(prefix=f"lightning-shard-rank-{rank}-", suffix=".txt")
        with open(number, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError:
        return ""
    return path


def _told(activity: Activity, now: float) -> str:
    does = "began" if activity.inside else "ended"
    ago = max(0.0, now - activity.since)
    return f"{ago:9.3f} s ago  {does} {activity.operation} (its operation {activity.number})"


def _stacks() -> Iterable[str]:
    names = {one.ident: one.name for one in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"Thread {names.get(ident, ident)}, most recent call last:"
        yield "".join(traceback.format_stack(frame))
