"""The subcommand `report`: a page of what a run's callbacks have written; torch is not imported."""

import sys
import traceback
from argparse import Namespace

from lightning_shard.errors import ShardError
from lightning_shard.reporting.page import write_report


def run(subcommand: str, given: Namespace) -> int:
    """Run `report` and return the exit code: 1 where there is nothing to report."""
    try:
        path = write_report(given.run_folder, given.output)
    except ShardError as error:
        if given.debug:
            traceback.print_exc()
        else:
            print(f"lightning-shard: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0
