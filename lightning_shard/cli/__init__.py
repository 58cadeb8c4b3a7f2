"""The `lightning-shard` command: Lightning's own command line, with this package's strategies.

    lightning-shard fit --config configs/gpt_zero3.yaml
    lightning-shard test --config configs/digits_zero2.yaml --trainer.devices 2

    lightning-shard plan --config configs/gpt_zero3.yaml --devices 64

    lightning-shard doctor
    lightning-shard strategies
    lightning-shard report runs/1

    lightning-shard describe last.ckpt
    lightning-shard consolidate last.ckpt model.safetensors

The subcommands `fit`, `validate`, `test` and `predict` are in `shard_cli`, which imports torch and
Lightning; `plan` is in `planning`, and so does it; `describe` and `consolidate` are in
`checkpoints`, which imports torch; `report` is in `reporting`, which imports neither. What needs
neither is answered without them: see `entry`, `parsers`, `machine`, `completion`.
"""

from lightning_shard.cli.entry import main

__all__ = ["main"]
