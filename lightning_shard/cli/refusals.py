"""An error of this package, as every subcommand tells it: one line, or a traceback to debug."""

import sys
import traceback

from lightning_shard.errors import ShardError


def tell(error: ShardError, *, debug: bool) -> None:
    """Print an error that is being handled.

    Args:
        error: The error.
        debug: Whether to print where it was raised, too.
    """
    if debug:
        traceback.print_exc()
    else:
        print(f"lightning-shard: {type(error).__name__}: {error}", file=sys.stderr)
