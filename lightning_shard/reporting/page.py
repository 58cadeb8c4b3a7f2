"""The report of a run: one HTML page that needs nothing else, with a section for each question.

A section without figures says what would have to be there. The page has no script, and its policy
forbids it to fetch anything.
"""

from collections.abc import Callable
from pathlib import Path

from lightning_shard.reporting import sections
from lightning_shard.reporting.plan_section import plan
from lightning_shard.reporting.records import RunRecords, read_run
from lightning_shard.reporting.style import STYLE
from lightning_shard.reporting.texts import escape

SECTIONS: dict[str, tuple[str, Callable[[RunRecords], str]]] = {
    "loss": ("Loss", sections.loss),
    "steps": ("Where the time of a step goes", sections.step_times),
    "ranks": ("Ranks and stragglers", sections.ranks),
    "throughput": ("Throughput", sections.throughput),
    "memory": ("Memory", sections.memory),
    "traffic": ("Traffic", sections.traffic),
    "pipeline": ("Pipeline", sections.pipeline),
    "plan": ("Plan and run", plan),
    "events": ("Events", sections.events),
}
"""By its id each section's heading, and what makes it."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_of(run: RunRecords) -> str:
    """Return the page as text."""
    title = sections.title(run)
    parts = "\n".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2>{make(run)}</section>'
        for name, (heading, make) in SECTIONS.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{sections.head(run)}\n{parts}\n</body></html>\n"
    )


def write_report(run_folder: str | Path, output: str | Path | None = None) -> Path:
    """Make the page of a run, which may still go on.

    Args:
        run_folder: Folder that the run's callbacks write into.
        output: File of the page; None for `report.html` in the folder.

    Returns:
        Path of the page.

    Raises:
        ConfigError: The folder has no records, or holds a plan that cannot be read.
    """
    page = page_of(read_run(run_folder))
    path = Path(run_folder) / "report.html" if output is None else Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
