"""The section of a report that holds a plan to account."""

from lightning_shard.reporting.html import paragraph, table
from lightning_shard.reporting.plan_deviation import deviations, why_of_another_run
from lightning_shard.reporting.records import PLAN, RunRecords


def plan(run: RunRecords) -> str:
    """Show what was planned beside what was measured, and by how much they differ."""
    rows = deviations(run)
    if not rows:
        return paragraph(
            f"No plan lies with the run: add PlanMonitor(plan=...) to the callbacks, or write what "
            f"`lightning-shard plan --json` prints to {run.folder / PLAN}."
        )
    said = (
        "Memory is that of the fullest rank, traffic that of the rank that sends most in a step. "
        "Planned times are those at the profile's peaks."
    )
    besides = why_of_another_run(run)
    return "".join(
        [
            paragraph(said, "faint"),
            paragraph(besides, "bad") if besides else "",
            table(("", "planned", "measured", "deviation"), [one.cells for one in rows]),
        ]
    )
