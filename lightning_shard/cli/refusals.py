"""An error of this package, as every subcommand tells it: one line, or a traceback to debug."""

import sys
import traceback
from collections.abc import Callable

from lightning_shard.errors import ShardError


def told(run: Callable[[], int], *, debug: bool, status: int = 1) -> int:
    """Run a subcommand and return its exit code.

    Args:
        run: Runs the subcommand and returns its exit code.
        debug: Whether to print where an error was raised, too.
        status: The exit code where an error has ended it.
    """
    try:
        return run()
    except ShardError as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"lightning-shard: {type(error).__name__}: {error}", file=sys.stderr)
        return status
