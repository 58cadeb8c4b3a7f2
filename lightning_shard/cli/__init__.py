"""The `lightning-shard` command: Lightning's own command line, with this package's strategies.

Each subcommand is in a module that is imported for it alone: `fit` and the like (`shard_cli`) need
torch and Lightning; what needs neither is answered without them, see `entry` and `parsers`.
"""

from lightning_shard.cli.entry import main

__all__ = ["main"]
