"""The subcommand `report`: a page of what a run's callbacks have written; torch is not imported."""

from argparse import Namespace

from lightning_shard.cli.refusals import tell
from lightning_shard.errors import ShardError
from lightning_shard.reporting.page import write_report


def run(subcommand: str, given: Namespace) -> int:
    """Run `report` and return the exit code: 1 where there is nothing to report."""
    try:
        path = write_report(given.run_folder, given.output)
    except ShardError as error:
        tell(error, debug=given.debug)
        return 1
    print(path)
    return 0
