"""The `lightning-shard` command: Lightning's own command line, with this package's strategies.

    lightning-shard fit --config configs/gpt_zero3.yaml
    lightning-shard test --config configs/digits_zero2.yaml --trainer.devices 2

The subcommands are `fit`, `validate`, `test` and `predict`: see `shard_cli`, which imports torch
and Lightning. What needs neither is answered without them: see `entry`.
"""

from lightning_shard.cli.entry import main

__all__ = ["main"]
