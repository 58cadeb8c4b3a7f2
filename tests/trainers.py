"""Trainers that print, log and save nothing by themselves."""

from typing import Any

import lightning as L  # noqa: N812

SILENT: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def cpu_trainer(**options: Any) -> L.Trainer:
    """Return a silent Trainer on CPU devices, with these options."""
    return L.Trainer(**({"accelerator": "cpu"} | SILENT | options))
