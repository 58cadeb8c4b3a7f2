"""The report of a run: one HTML page that needs nothing else, with a section for each question.

A section without figures says what would have to be there. The page has no script, and its policy
forbids it to fetch anything.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

from lightning_shard.reporting import sections
from lightning_shard.reporting.records import RunRecords, read_run
from lightning_shard.reporting.sections import plan

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --text: #1c2128; --faint: #6a737d; --rule: #d8dee4; --box: #f6f8fa;
  --s0: #2f6fb5; --s1: #d9822b; --s2: #7a8794; --s3: #b8a12e; --s4: #c2453d; --s5: #8a4fb0;
  --s6: #3a9a6b; --s7: #c86fa8; --s8: #4aa3b8; --s9: #8c6d4f; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161c; --text: #e3e8ee; --faint: #98a2ad; --rule: #323a44; --box: #1b2129;
  --s0: #6aa7e8; --s1: #f0a35a; --s2: #97a3af; --s3: #d8c356; --s4: #ec7a70; --s5: #b98bdc;
  --s6: #67c797; --s7: #e39ccb; --s8: #78c6d8; --s9: #b89878; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 960px; padding: 24px 20px 60px; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 38px 0 6px; }
p { margin: 6px 0; } .faint { color: var(--faint); } .bad { color: var(--s4); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0; }
.tile { background: var(--box); border: 1px solid var(--rule); border-radius: 8px;
  padding: 8px 14px; min-width: 120px; }
.tile b { display: block; font-size: 19px; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { color: var(--faint); font-weight: 500; }
th:first-child, td:first-child { text-align: left; } td.words { text-align: left;
  white-space: normal; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg .label { text-anchor: end; fill: var(--faint); } svg .tick { fill: var(--faint);
  text-anchor: middle; }
svg .inside { text-anchor: middle; fill: var(--page); font-size: 10px; pointer-events: none; }
svg .level { stroke: var(--rule); } svg .line { fill: none; stroke-width: 1.6; }
svg .edge { stroke: var(--page); stroke-width: 0.4; } svg circle { fill: transparent; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 6px 0;
  list-style: none; color: var(--faint); font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 5px; }
""" + "".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} rect.s{n} {{ fill: var(--s{n}); }} "
    f"i.s{n} {{ background: var(--s{n}); }} circle.s{n}:hover {{ fill: var(--s{n}); }}\n"
    for n in range(10)
)


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
