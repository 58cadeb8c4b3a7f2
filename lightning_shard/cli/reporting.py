"""The subcommand `report`: a page of what a run's callbacks have written; torch is not imported."""

from argparse import Namespace

from lightning_shard.core.reporting.page import write_report


def run(subcommand: str, given: Namespace) -> int:
    """Run `report` and return the exit code."""
    print(write_report(given.run_folder, given.output))
    return 0
