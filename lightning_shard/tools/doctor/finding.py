"""One answer of the doctor."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_shard.core.reporting.output import format_bytes

State = Literal["ok", "absent", "warning", "failure"]
size = partial(format_bytes, digits=".4g")


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        state: "ok"; "absent", which matters only to those who want it; "warning", where something
            is slow or fails later; "failure", where training does.
        advice: What to do; empty where nothing has to be done.
    """

    state: State
    subject: str
    found: str
    advice: str = ""


ok = partial(Finding, "ok")
absent = partial(Finding, "absent")
warning = partial(Finding, "warning")
failure = partial(Finding, "failure")


def judged(is_ok: bool, subject: str, found: str, advice: str) -> Finding:
    """Return that something is as it should be, or else slow or failing later, with advice."""
    return ok(subject, found) if is_ok else warning(subject, found, advice)
