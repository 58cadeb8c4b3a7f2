"""`python -m lightning_shard.cli`, the same as the command."""

import sys

from lightning_shard.cli import main

if __name__ == "__main__":
    sys.exit(main())
