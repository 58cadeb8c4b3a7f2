"""One answer of the doctor."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_shard.core.reporting.output import format_bytes

State = Literal["ok", "absent", "warning", "failure"]
size = partial(format_bytes, digits=".4g")


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


def ok(subject: str, found: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(subject=subject, state="ok", found=found)


def absent(subject: str, found: str, advice: str = "") -> Finding:
    """Return that something is not there, which matters only to those who want it."""
    return Finding(subject=subject, state="absent", found=found, advice=advice)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Return that something is slow, or fails later."""
    return Finding(subject=subject, state="warning", found=found, advice=advice)


def failure(subject: str, found: str, advice: str = "") -> Finding:
    """Return that training fails with something."""
    return Finding(subject=subject, state="failure", found=found, advice=advice)
