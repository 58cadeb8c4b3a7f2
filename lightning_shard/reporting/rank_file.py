"""The file of one rank: a JSON object a line, written at once, so that it can be read any time.

    {"kind": "fit", "time": 1790000000.1, "rank": 0, "step": 0, "world_size": 4, ...}
    {"kind": "step", "time": 1790000000.9, "rank": 0, "step": 1, "seconds": 0.21, "loss": 5.5, ...}

A line is one `write` to a file that is open for appending, so that several callbacks of a rank, and
an elastic rank's successor, can write to one file.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "monitor"
"""Folder of the ranks' files in a run's folder."""


def path_of(run_folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return Path(run_folder) / FOLDER / f"rank_{rank:05}.jsonl"


class RankFile:
    """Appends records to a rank's file, which is made with the first one.

    Args:
        run_folder: Folder of the run.
        rank: Global rank whose file it is.
    """

    def __init__(self, run_folder: str | Path, rank: int) -> None:
        self.path = path_of(run_folder, rank)
        self.rank = rank
        self._descriptor: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out: a copy opens it anew."""
        return {**vars(self), "_descriptor": None}

    def append(self, kind: str, step: int, **figures: Any) -> None:
        """Write one record.

        Args:
            kind: What the record is about, such as "step".
            step: Optimizer steps that had been taken.
            **figures: What JSON can hold; numbers that are not finite become null.

        Raises:
            OSError: The file cannot be made or written.
        """
        head = {"kind": kind, "time": time.time(), "rank": self.rank, "step": step}
        line = json.dumps(_finite({**head, **figures}), allow_nan=False) + "\n"
        os.write(self._opened(), line.encode())

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
            self._descriptor = os.open(self.path, flags, 0o644)
        return self._descriptor


def _finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
