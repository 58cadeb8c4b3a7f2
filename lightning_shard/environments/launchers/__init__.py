"""Lightning launchers: start the ranks and run the trainer's function on each."""

from lightning_shard.environments.launchers.in_process import InProcessLauncher

__all__ = ["InProcessLauncher"]
