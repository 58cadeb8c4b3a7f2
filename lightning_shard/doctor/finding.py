"""One answer of the doctor."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "warning", "failure"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check has found.

    Attributes:
        subject: What was looked at.
        state: "ok"; "absent", which matters only to those who want it; "warning", where something
            is slow or fails later; "failure", where training does.
        found: What is there.
        advice: What to do; empty where nothing has to be done.
    """

    subject: str
    state: State
    found: str
    advice: str = ""


def size(num_bytes: float) -> str:
    """Return bytes in the largest binary unit that leaves a number of at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
