"""What subcommands share that read a fit's configuration, and make Trainers of their own."""

import sys
from typing import Any
from unittest.mock import patch

from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_shard.cli.shard_cli import ShardCLI, find_classes_here

# Lightning's own callbacks look on, but for these.
_TRAINING = (
    lightning_callbacks.BaseFinetuning,
    lightning_callbacks.GradientAccumulationScheduler,
    lightning_callbacks.StochasticWeightAveraging,
    lightning_callbacks.WeightAveraging,
)
_WATCHING = (
    "lightning.pytorch.",
    "pytorch_lightning.",
    "lightning_shard.profiling.",
    "lightning_shard.replay.",
)


class CLIWithoutTrainer(ShardCLI):
    """Reads the configuration of a fit, and makes everything in it but the Trainer.

    Args:
        name: Name of the subcommand.
        description: What it does.
    """

    def __init__(self, name: str, description: str) -> None:
        find_classes_here()
        with patch.object(sys, "argv", [sys.argv[0], *sys.argv[2:]]):
            super().__init__(
                run=False,
                save_config_callback=None,
                parser_kwargs={"prog": f"lightning-shard {name}", "description": description},
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        # saved configurations of `fit` have these
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Not used.")
        parser.add_argument("--weights_only", type=bool | None, default=None, help="Not used.")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return nothing: the subcommand makes Trainers of its own."""
        return None

    @property
    def given_trainer(self) -> dict[str, Any]:
        """What the configuration says of the Trainer."""
        return dict(self._get(self.config_init, "trainer", default={}))

    @property
    def training_callbacks(self) -> list[Callback]:
        """The callbacks that may change what is trained."""
        given = self.given_trainer.get("callbacks")
        listed = given if isinstance(given, list) else [given] if given is not None else []
        return [
            one
            for one in listed
            if isinstance(one, _TRAINING) or not f"{type(one).__module__}.".startswith(_WATCHING)
        ]
